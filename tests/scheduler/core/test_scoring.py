"""Log-probabilities of prompts: each position scored once, told once it is whole."""

from dataclasses import replace

import pytest

from services.scheduler.core.events import StepFinished
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import (
    MAX_SCORED_TOKENS,
    Attached,
    CancelReason,
    Finished,
    GeneratedSequence,
    PositionLogprobs,
    Refused,
    Score,
    Tokens,
)
from shared.sampling import FinishReason


def asked(house, name):
    """(first position, number) of each score that plans asked for this request."""
    sequence_id = house.sequence(name).sequence_id
    return [
        (row.score.first_position, len(row.score.token_ids))
        for plan in house.plans
        for row in plan.rows
        if row.sequence_id == sequence_id and row.score is not None
    ]


def told(house, name, gateway="g"):
    return house.stream(name, gateway).prompt_logprobs


def runs(house):
    return [run for message in house.replies(Tokens) for run in message.items]


# ------------------------------------------------------------------ what is asked


def test_every_prompt_token_but_the_first_is_scored_where_the_one_before_it_stands(house):
    house.submit("A", prompt=(4, 5, 6, 7), max_tokens=2, ignore_eos=True, prompt_logprobs=3)
    assert house.plans[-1].rows[0].score == Score(0, (5, 6, 7), 3)
    house.step()
    assert [(run.start, run.prompt_logprobs) for run in runs(house)] == [(0, house.scores("A"))]
    assert house.plans[-1].rows[0].score is None
    house.step()
    assert [(run.start, run.prompt_logprobs) for run in runs(house)] == [(1, ())]


def test_who_does_not_ask_gets_no_scores(house):
    house.submit("A", max_tokens=2, logprobs=1)
    assert house.plans[-1].rows[0].score is None
    house.run()
    assert told(house, "A") == ()


def test_chunks_score_what_they_compute(build):
    house = build(max_num_batched_tokens=4)
    house.submit("A", prompt=10, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    house.run()
    assert asked(house, "A") == [(0, 4), (4, 4), (8, 1)]
    assert told(house, "A") == house.scores("A")
    assert house.tokens("A") == house.solo("A")


def test_a_chunk_that_holds_only_the_last_token_scores_nothing(build):
    house = build(max_num_batched_tokens=4)
    house.submit("A", prompt=9, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    house.run()
    assert asked(house, "A") == [(0, 4), (4, 4)]
    assert told(house, "A") == house.scores("A")


# ------------------------------------------------------------------ the budget


def test_a_plan_scores_so_many_tokens_and_the_rest_of_its_budget_goes_to_others(build):
    house = build(num_blocks=64, max_scored_tokens=5)
    house.submit("A", prompt=12, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    house.submit("B", prompt=12, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    house.submit("C", prompt=30, max_tokens=2, ignore_eos=True)
    house.run()
    assert asked(house, "A") == [(0, 5), (5, 5), (10, 1)]
    assert asked(house, "B") == [(0, 4), (4, 5), (9, 2)]  # the rest of the third, then its own
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)
        assert told(house, name) == house.scores(name)


def test_the_default_budget_is_that_of_the_protocol(build):
    house = build(num_blocks=400, block_size=4, max_model_len=1024)
    house.submit("A", prompt=600, max_tokens=1, prompt_logprobs=0)
    house.run()
    assert asked(house, "A") == [
        (0, MAX_SCORED_TOKENS), (MAX_SCORED_TOKENS, MAX_SCORED_TOKENS), (512, 87),
    ]  # fmt: skip


def test_decodes_go_on_in_every_step_while_prompts_are_scored(build):
    house = build(num_blocks=64, max_scored_tokens=2)
    house.submit("A", prompt=3, max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("B", prompt=15, max_tokens=1, prompt_logprobs=0)
    for _ in range(6):
        house.step()
        assert house.rows()["A"][1] == 1
    house.run()
    assert (told(house, "B"), house.tokens("A")) == (house.scores("B"), house.solo("A"))


def test_many_that_want_scores_all_come_to_their_end_the_oldest_first(build):
    house = build(num_blocks=64, max_scored_tokens=2)
    ends = []
    for name in "ABCDEF":
        house.submit(name, prompt=7, max_tokens=0, prompt_logprobs=1)
    while house.in_flight:
        house.step()
        ends += [message.request_id for message in house.replies(Finished)]
    assert ends == list("ABCDEF")
    for name in "ABCDEF":
        assert told(house, name) == house.scores(name)


def test_tokens_that_a_score_does_not_use_go_to_those_behind_it_in_the_same_plan(build):
    house = build(num_blocks=64, max_scored_tokens=5, max_num_batched_tokens=12)
    house.submit("A", prompt=20, max_tokens=1, prompt_logprobs=0)
    house.submit("B", prompt=20, max_tokens=1)
    house.submit("C", prompt=20, max_tokens=1)
    assert house.rows() == {"A": (0, 5, 0)}
    house.step()
    assert house.rows() == {"A": (5, 5, 0), "B": (0, 7, 0)}
    house.step()  # B is under way now, and takes what A is granted and may not use
    assert house.rows() == {"A": (10, 5, 0), "B": (7, 7, 0)}
    house.run()
    for name in "ABC":
        assert (house.tokens(name), told(house, name)) == (house.solo(name), house.scores(name))


def test_who_wants_scores_holds_up_those_behind_it_until_the_budget_has_room(build):
    """Arrival order goes first: C could run beside A, but B came before it."""
    house = build(num_blocks=64, max_scored_tokens=5)
    house.submit("A", prompt=12, max_tokens=1, prompt_logprobs=0)
    house.submit("B", prompt=12, max_tokens=1, prompt_logprobs=0)
    house.submit("C", prompt=3, max_tokens=1)
    house.step()
    assert house.rows() == {"A": (5, 5, 0)}
    house.step()
    assert house.rows() == {"A": (10, 2, 1), "B": (0, 4, 0), "C": (0, 3, 1)}


# ------------------------------------------------------------------ interrupted


def test_scores_between_them_make_three_losses_none_in_a_row(build):
    house = build(max_scored_tokens=3)
    house.submit("A", prompt=20, max_tokens=0, prompt_logprobs=1)
    for _ in range(5):
        house.lose_executor()
        house.join()
        house.step()
    house.run()
    assert house.finish("A") is FinishReason.LENGTH
    assert told(house, "A") == house.scores("A")


def test_what_is_scored_is_kept_through_an_executor_loss_and_only_the_rest_is_asked_for(build):
    house = build(max_num_batched_tokens=4)
    house.submit("A", prompt=11, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    house.step()
    house.lose_executor()  # with the second chunk in flight
    house.join()
    house.run()
    assert asked(house, "A") == [(0, 4), (4, 4), (4, 4), (8, 2)]
    assert told(house, "A") == house.scores("A")
    assert house.tokens("A") == house.solo("A")


def test_recomputing_what_is_scored_costs_no_budget_of_scores(build):
    house = build(max_scored_tokens=3)
    house.submit("A", prompt=12, max_tokens=1, prompt_logprobs=1)
    house.step(2)
    house.lose_executor()
    house.join()
    assert house.rows()["A"] == (0, 9, 0)  # six again, and three more
    house.run()
    assert asked(house, "A") == [(0, 3), (3, 3), (6, 3), (6, 3), (9, 2)]
    assert told(house, "A") == house.scores("A")


def test_what_is_scored_is_kept_by_who_gives_way(build):
    """A's decodes eat the blocks promised to B while B is scored token by token."""
    house = build(num_blocks=6, block_size=2, max_scored_tokens=1)
    house.submit("A", prompt=2, max_tokens=11, ignore_eos=True)
    house.step()
    house.submit("B", prompt=8, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    while not house.plans[-1].preemptions:
        house.step()
    assert 0 < len(asked(house, "B")) < 7
    house.run()
    assert asked(house, "B") == [(position, 1) for position in range(7)]  # none of them twice
    assert told(house, "B") == house.scores("B")
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ only scored


def test_r6_with_nothing_to_generate_the_prompt_is_scored_and_that_is_all(house):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=2)
    (row,) = house.plans[-1].rows
    assert (len(row.token_ids), row.samples) == (5, ())  # the last token tells of nothing after it
    house.step()
    assert [(run.start, run.token_ids) for run in runs(house)] == [(0, ())]
    (finished,) = house.replies(Finished)
    assert (finished.reason, finished.length) == (FinishReason.LENGTH, 0)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (6, 0)
    assert told(house, "A") == house.scores("A")
    assert (house.free, house.core.counters.tokens()) == (16, (6, 0))


def test_a_prompt_of_one_token_has_nothing_to_score_and_ends_at_once(house):
    house.submit("A", prompt=1, max_tokens=0, prompt_logprobs=2)
    assert (house.finish("A"), house.plans, runs(house)) == (FinishReason.LENGTH, [], [])
    house.submit("B", prompt=1, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    house.run()
    assert (asked(house, "B"), house.tokens("B")) == ([], house.solo("B"))


def test_a_prompt_of_two_tokens_is_scored_by_one_of_them(house):
    house.submit("A", prompt=2, max_tokens=0, prompt_logprobs=0)
    assert house.rows() == {"A": (0, 1, 0)}
    house.step()
    assert told(house, "A") == house.scores("A")


def test_the_empty_run_comes_again_if_it_was_lost(house):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=2)
    gateway = house.gateways[b"g"]
    gateway.is_deaf = gateway.may_gap = True
    house.run()
    gateway.is_deaf = False
    assert (told(house, "A"), house.beat("A")) == ((), [])
    house.beat("A")
    assert told(house, "A") == house.scores("A")
    assert house.finish("A") is FinishReason.LENGTH


def test_a_heartbeat_does_not_bring_half_of_the_scores(build):
    house = build(max_num_batched_tokens=3)
    house.submit("A", prompt=9, max_tokens=0, prompt_logprobs=0)
    house.step()
    for _ in range(3):
        house.beat("A")
        assert runs(house) == []
    house.attach("A", "h")
    (attached,) = house.replies(Attached)
    assert (attached.prompt_logprobs, runs(house)) == ((), [])
    house.run()
    assert told(house, "A", "h") == house.scores("A")
    assert told(house, "A", "g") == ()


def test_attach_and_a_second_submit_bring_the_scores(house):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=2, gateway="g")
    house.run()
    house.attach("A", "h")
    assert house.replies(Attached)[0].prompt_logprobs == house.scores("A")
    assert house.finish("A", "h") is FinishReason.LENGTH
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=2, gateway="i")
    assert told(house, "A", "i") == house.scores("A")
    assert house.finish("A", "i") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_taken"), [(17, 0, True), (18, 0, False), (16, 1, True)]
)
def test_a_prompt_that_is_only_scored_must_fit_the_pool_but_for_its_last_token(
    build, prompt, max_tokens, is_taken
):
    house = build(4, 4)
    house.submit("A", prompt=prompt, max_tokens=max_tokens, prompt_logprobs=0)
    if is_taken:
        house.run()
        assert told(house, "A") == house.scores("A")
    else:
        assert house.stream("A").refused.code is ErrorCode.NEVER_FITS


def test_only_scored_ones_leave_and_give_way_like_all_others(build):
    house = build(max_num_batched_tokens=3)
    for name in "ABC":
        house.submit(name, prompt=9, max_tokens=0, prompt_logprobs=0)
    house.step()
    house.cancel("A")
    house.stop_string("B")
    assert house.finish("B") is FinishReason.STOP
    house.run()
    assert house.status("A") is None
    assert told(house, "C") == house.scores("C")


# ------------------------------------------------------------------ a new scheduler


def test_a_new_scheduler_scores_what_was_not_delivered(build):
    first = build(max_num_batched_tokens=3)
    first.submit("A", prompt=9, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    first.step()
    second = build()
    second.submit(
        "A", prompt=9, max_tokens=2, prompt_logprobs=1, ignore_eos=True,
        extra={"resubmitted": True},
    )  # fmt: skip
    second.run()
    assert asked(second, "A") == [(0, 8)]
    assert told(second, "A") == second.scores("A")


def test_a_new_scheduler_does_not_score_again_what_was_delivered(build):
    first = build()
    first.submit("A", prompt=9, max_tokens=5, prompt_logprobs=1, ignore_eos=True)
    first.step(2)
    second = build()
    second.submit(
        "A", prompt=9, max_tokens=5, prompt_logprobs=1, ignore_eos=True,
        extra={
            "generated": (GeneratedSequence(first.tokens("A")),),
            "prompt_logprobs": told(first, "A"),
            "resubmitted": True,
        },
    )  # fmt: skip
    second.attach("A", "h")
    assert second.replies(Attached)[0].prompt_logprobs == first.scores("A")
    second.run()
    assert asked(second, "A") == []
    assert second.tokens("A", "h") == first.solo("A")


def test_an_only_scored_one_whose_scores_were_delivered_is_over(build):
    first = build()
    first.submit("A", prompt=9, max_tokens=0, prompt_logprobs=1)
    first.run()
    second = build()
    second.submit(
        "A", prompt=9, max_tokens=0, prompt_logprobs=1,
        extra={"prompt_logprobs": told(first, "A"), "resubmitted": True},
    )  # fmt: skip
    assert (second.finish("A"), second.plans) == (FinishReason.LENGTH, [])


ENTRY = PositionLogprobs(-1.0, 1)


@pytest.mark.parametrize(("number", "wanted"), [(1, 0), (4, 0), (6, 0), (5, None), (1, None)])
def test_scores_of_another_prompt_are_refused(house, number, wanted):
    house.submit(
        "A", prompt=6, prompt_logprobs=wanted, extra={"prompt_logprobs": (ENTRY,) * number}
    )
    (refusal,) = house.replies(Refused)
    assert (refusal.code, refusal.param) == (ErrorCode.INVALID, "prompt_logprobs")


# ------------------------------------------------------------------ a wrong executor


def spoil(house, change):
    """Run the plan in flight, but say what `change` makes of its scores."""
    plan = house.in_flight.pop(0)
    result = house.executor.run(plan)
    house.handle(StepFinished(house.later(), replace(result, scored=change(result.scored))))


def first_entry(**changes):
    def change(scored):
        (one,) = scored
        entry = replace(one.logprobs[0], **changes)
        return (replace(one, logprobs=(entry, *one.logprobs[1:])),)

    return change


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (lambda scored: (), "scored nothing"),
        (lambda scored: (replace(scored[0], sequence_id=999),), "scored nothing"),
        (lambda scored: (replace(scored[0], first_position=1),), "5 prompt tokens at 1; 5 at 0"),
        (lambda scored: (replace(scored[0], logprobs=scored[0].logprobs[1:]),), "4 prompt tokens"),
        (lambda scored: (replace(scored[0], logprobs=scored[0].logprobs * 2),), "10 prompt tokens"),
        (first_entry(chosen=float("nan")), "are none"),
        (first_entry(top_ids=()), "0 likeliest"),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_scores_that_are_not_what_was_asked_for_end_that_request_alone(
    house, change, flaw, max_tokens
):
    house.submit("B", prompt=3, max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("A", prompt=6, max_tokens=max_tokens, prompt_logprobs=1)
    house.step()
    spoil(house, change)
    finished = house.stream("A").finished
    assert (finished.reason, finished.code, finished.length) == (
        FinishReason.ERROR, ErrorCode.INTERNAL, 0,
    )  # fmt: skip
    assert flaw in finished.error
    assert told(house, "A") == ()
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_scores_nobody_asked_for_are_not_looked_at(house):
    house.submit("A", prompt=6, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    house.step()
    late = house.results[-1].scored
    spoil(house, lambda scored: late)
    house.run()
    assert told(house, "A") == house.scores("A")
    assert house.tokens("A") == house.solo("A")


def test_an_executor_lost_again_and_again_at_its_last_scores_ends_the_request(house):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=1)
    for _ in range(3):
        house.lose_executor()
        house.join()
    assert house.finish("A") is FinishReason.ERROR
    assert house.status("A") is Status.FINISHED


@pytest.mark.parametrize("reason", list(CancelReason))
def test_a_scored_request_given_up_in_mid_step_wants_no_scores(house, reason):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=1)
    house.cancel("A", reason)
    house.step()
    assert (runs(house), house.free) == ([], 16)
