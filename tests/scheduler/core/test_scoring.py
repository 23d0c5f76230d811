"""Log-probabilities of prompts: each position scored once, told once it is whole."""

import pytest

from shared.errors import ErrorCode
from shared.messages import (
    Attached,
    Finished,
    GeneratedSequence,
    PositionLogprobs,
    Refused,
    Score,
)
from shared.sampling import FinishReason
from tests.scheduler.core.scores import asked, runs, told

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
