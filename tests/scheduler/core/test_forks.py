"""Several answers to one prompt: its blocks are there once, and each answer is its own."""

import pytest

from services.scheduler.core.intake import blocks_needed
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import CancelReason, Finished, GeneratedSequence, Move, PreemptionMode
from shared.sampling import FinishReason


def finishes(house, name):
    return [house.finish(name, index=index) for index in range(house.width(name))]


# ------------------------------------------------------------------ figure 8


def test_figure_8_as_the_scheduler_plans_it(build):
    """A1 and A2 share blocks 7 and 1; A1 writes first, so block 1 is copied to 3 for it."""
    house = build(8, 4, free_order=[7, 1, 3, 0, 2, 4, 5, 6])
    house.submit("A", prompt=7, max_tokens=3, ignore_eos=True, n=2)
    assert [house.table("A", index) for index in (0, 1)] == [((7, 4), (1, 3))] * 2
    assert [house.ref_count(block) for block in (7, 1)] == [2, 2]
    assert [len(row.samples) for row in house.plans[-1].rows] == [2]
    house.step()
    assert house.plans[-1].copies == (Move(1, 3),)
    assert house.table("A", 0) == ((7, 4), (3, 4))
    assert house.table("A", 1) == ((7, 4), (1, 4))  # the last one writes in place
    assert [house.ref_count(block) for block in (7, 1, 3)] == [2, 1, 1]
    assert house.core.counters.cow_copies == 1
    house.run()
    assert house.answers("A") == house.solos("A")


def test_figure_7_two_requests_whose_blocks_lie_in_each_others_gaps(build):
    house = build(8, 4, free_order=[7, 1, 5, 2, 3, 0, 4, 6])
    house.submit("A", prompt=7, max_tokens=3, ignore_eos=True)
    house.submit("B", prompt=5, max_tokens=4, ignore_eos=True)
    house.step(2)
    assert house.table("A") == ((7, 4), (1, 4), (3, 1))
    assert house.table("B") == ((5, 4), (2, 2))


# ------------------------------------------------------------------ r11, r13


def test_r13_four_answers_from_one_prompt(build):
    """The prompt is computed once and its blocks have four owners; all end, each once."""
    house = build(64, 4)
    house.submit("A", prompt=9, max_tokens=6, n=4, seed=7, ignore_eos=True)
    assert [row.token_ids for row in house.plans[0].rows] == [house.submits["A"].prompt]
    assert [ask.index for ask in house.plans[0].rows[0].samples] == [0, 1, 2, 3]
    assert [house.ref_count(block) for block, _ in house.table("A")] == [4, 4, 4]
    assert house.core.usage().num_used == 3
    house.run()
    assert house.answers("A") == house.solos("A")
    assert len(set(house.answers("A"))) == 4
    assert finishes(house, "A") == [FinishReason.LENGTH] * 4
    assert [house.stream("A", index=index).num_finished for index in range(4)] == [1] * 4
    assert house.core.counters.computed_tokens == 9 + 4 * 5
    first = house.answers("A")
    house.submit("AA", house.submits["A"].prompt, max_tokens=6, n=4, seed=7, ignore_eos=True)
    house.run()
    assert house.answers("AA") == first


def test_r11_usage_sums_all_answers_and_counts_the_prompt_once(build):
    house = build(64, 4)
    house.submit("A", prompt=9, max_tokens=6, n=2, ignore_eos=True)
    house.run()
    usage = house.stream("A", index=1).finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 12)
    assert house.core.counters.prompt_tokens == 9


@pytest.mark.parametrize("prompt", [7, 8])
@pytest.mark.parametrize("settings", [{}, {"plans_in_flight": 2}, {"max_num_batched_tokens": 5}])
def test_answers_end_when_they_end_and_the_others_go_on(build, settings, prompt):
    house = build(64, 4, enable_prefix_caching=True, **settings)
    house.submit("A", prompt=prompt, max_tokens=40, n=5, stop_token_ids=tuple(range(1, 5)))
    house.run()
    assert house.answers("A") == house.solos("A")
    assert len({len(answer) for answer in house.answers("A")}) > 1
    assert FinishReason.STOP in finishes(house, "A")


def test_the_first_answer_may_end_with_its_first_token(build):
    """The lead is gone before anybody has written; the others have its prompt all the same."""
    house = build(64, 4)
    first = None
    for seed in range(200):
        house.submit("A", prompt=6, max_tokens=5, n=3, seed=seed, stop_token_ids=range(1, 12))
        first = house.solos("A")
        if len(first[0]) == 1 and min(map(len, first[1:])) > 1:
            break
        house.cancel("A")
        house.run()
    house.step()
    assert house.finish("A") is FinishReason.STOP
    assert house.status("A") is Status.RUNNING
    house.run()
    assert house.answers("A") == first


def test_one_token_each_needs_no_further_block(build):
    house = build(2, 4)
    house.submit("A", prompt=8, max_tokens=1, n=6, ignore_eos=True)
    assert len(house.plans) == 1
    house.run()
    assert (house.answers("A"), len(house.plans)) == (house.solos("A"), 1)


def test_penalties_logprobs_and_scores_of_several_answers(build):
    from tests.scheduler.core.walker import PENALTY

    house = build(64, 4, max_num_batched_tokens=6)
    house.submit(
        "A", prompt=9, max_tokens=4, n=3, draw=PENALTY, logprobs=2, prompt_logprobs=1,
        ignore_eos=True,
    )  # fmt: skip
    house.run()
    assert house.answers("A") == house.solos("A")
    assert house.stream("A").prompt_logprobs == house.scores("A")
    assert all(len(house.stream("A", index=index).logprobs) == 4 for index in range(3))


def test_several_answers_of_no_token_are_scored_once(build):
    house = build(64, 4)
    house.submit("A", prompt=9, max_tokens=0, n=3, prompt_logprobs=1)
    house.run()
    assert house.stream("A").prompt_logprobs == house.scores("A")
    assert finishes(house, "A") == [FinishReason.LENGTH] * 3


# ------------------------------------------------------------------ limits


def test_every_sequence_counts(build):
    house = build(64, 4, max_num_seqs=5)
    house.submit("A", prompt=3, max_tokens=6, n=3, ignore_eos=True)
    house.submit("B", prompt=3, max_tokens=6, n=3, ignore_eos=True)
    house.submit("C", prompt=3, max_tokens=6, n=2, ignore_eos=True)  # fits, but stands behind B
    house.step()
    assert [house.status(name) for name in "ABC"] == [
        Status.RUNNING, Status.WAITING, Status.WAITING,
    ]  # fmt: skip
    house.run()
    for name in "ABC":
        assert house.answers(name) == house.solos(name)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"max_num_seqs": 3}, "--max-num-seqs"),
     ({"max_num_batched_tokens": 3}, "--max-num-batched-tokens")],
)  # fmt: skip
def test_more_answers_than_may_run_are_refused_with_both_numbers(build, settings, flag):
    house = build(64, 4, **settings)
    house.submit("A", n=4)
    refused = house.stream("A").refused
    assert (refused.code, refused.param) == (ErrorCode.INVALID, "n")
    assert "is 4; at most 3" in refused.message
    assert flag in refused.message
    house.submit("B", n=3, max_tokens=2)
    assert house.stream("B").refused is None


def test_the_worst_case_is_the_prompt_once_and_then_n_tails(build):
    assert blocks_needed(9, 8, 3, 4) == 2 + 3 * 2
    house = build(8, 4)
    house.submit("A", prompt=9, max_tokens=8, n=3, ignore_eos=True)
    house.run()
    assert house.answers("A") == house.solos("A")
    house.submit("B", prompt=9, max_tokens=9, n=3)
    refused = house.stream("B").refused
    assert refused.code is ErrorCode.NEVER_FITS
    assert "needs 11 blocks" in refused.message
    assert "has 8" in refused.message
    assert "lower max_tokens, lower n, or give" in refused.message


def test_max_tokens_left_to_us_is_what_fits_for_all(build):
    house = build(8, 4, max_model_len=200)
    house.submit("A", prompt=9, max_tokens=None, n=3, ignore_eos=True)
    assert house.stream("A").max_tokens == 8
    house.run()
    assert house.answers("A") == house.solos("A", 8)


# ------------------------------------------------------------------ giving up


def test_one_answer_is_given_up_and_only_its_own_blocks_come_back(build):
    house = build(64, 4)
    house.submit("A", prompt=8, max_tokens=9, n=3, ignore_eos=True)
    house.step(2)
    used = house.core.usage().num_used
    house.stop_string("A", index=1)
    finished = house.replies(Finished)[0]
    assert (finished.sequence, finished.reason, finished.length) == (1, FinishReason.STOP, 2)
    house.step()
    assert house.core.usage().num_used == used - 1
    assert [house.ref_count(block) for block, _ in house.table("A")[:2]] == [2, 2]
    house.run()
    solos = house.solos("A")
    assert house.answers("A") == [solos[0], solos[1][:2], solos[2]]


def test_the_lead_is_given_up_before_the_prompt_is_computed(build):
    house = build(64, 4, max_num_batched_tokens=4)
    house.submit("A", prompt=10, max_tokens=4, n=3, ignore_eos=True)
    house.step()
    house.stop_string("A", index=0)
    assert house.status("A") is Status.WAITING  # to compute it again
    house.run()
    assert house.answers("A")[1:] == house.solos("A")[1:]


def test_the_whole_request_is_given_up(build):
    house = build(64, 4)
    house.submit("A", prompt=8, max_tokens=9, n=3, ignore_eos=True)
    house.step(2)
    house.cancel("A")
    house.step()
    assert (house.free, house.core.num_running) == (64, 0)


def test_r22_300_streams_of_several_answers_cut_after_three_tokens_leave_nothing(build):
    house = build(
        100, 4, num_cpu_blocks=60, preemption_mode="swap", enable_prefix_caching=True,
        plans_in_flight=2, max_num_seqs=64, laws_every=9,
    )  # fmt: skip
    names = [f"{at:03d}" for at in range(300)]
    for at, name in enumerate(names):
        house.submit(name, prompt=3 + at % 17, max_tokens=20, n=(1, 1, 4)[at % 3], ignore_eos=True)
    cut, swapped = set(), 0
    while house.in_flight:
        house.step()
        swapped = max(swapped, house.core.num_swapped)
        for name in names:
            if name not in cut and len(house.tokens(name)) >= 3:
                house.cancel(name)
                cut.add(name)
    assert len(cut) == 300
    core = house.core
    assert (core.num_running, core.num_waiting, core.num_swapped) == (0, 0, 0)
    assert (house.free, core.cpu_usage().num_free) == (100, 60)
    assert core.counters.prefix_cache_hits > 0


# ------------------------------------------------------------------ coming back


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_the_same_four_texts_through_giving_way(build, mode, cache, plans_in_flight):
    house = build(
        18, 4, num_cpu_blocks=40, preemption_mode=mode, enable_prefix_caching=cache,
        plans_in_flight=plans_in_flight,
    )  # fmt: skip
    for name in "ABC":
        house.submit(name, prompt=9, max_tokens=14, n=3, seed=7, ignore_eos=True)
    house.run()
    assert house.core.counters.preemptions[PreemptionMode(mode)] > 0
    for name in "ABC":
        assert house.answers(name) == house.solos(name)


def test_who_comes_back_shares_the_full_blocks_of_its_prompt_again(build):
    house = build(32, 4)
    house.submit("A", prompt=9, max_tokens=14, n=3, ignore_eos=True)
    house.step(4)
    house.lose_executor()
    house.join()
    rows = house.plans[-1].rows
    assert [len(row.token_ids) for row in rows] == [9 + 4]  # the lead alone
    assert [house.ref_count(block) for block, _ in house.table("A")] == [3, 3, 1, 1]
    house.step()
    assert [len(row.token_ids) for row in house.plans[-1].rows] == [1, 1 + 4, 1 + 4]
    assert [house.ref_count(block) for block, _ in house.table("A")][:2] == [3, 3]
    house.run()
    assert house.answers("A") == house.solos("A")


@pytest.mark.parametrize("prompt", [8, 9])
def test_several_answers_go_on_after_a_restart_of_the_scheduler(build, prompt):
    """The second one has nothing yet, so it must not share the prompt's very last token."""
    house = build(64, 4)
    house.submit("A", prompt=prompt, max_tokens=8, n=3, ignore_eos=True)
    house.run()
    whole = house.answers("A")
    house.submit(
        "B", house.submits["A"].prompt, max_tokens=8, n=3, ignore_eos=True,
        extra={"generated": (
            GeneratedSequence(whole[0][:3]), GeneratedSequence(()),
            GeneratedSequence(whole[2][:5], FinishReason.STOP),
        )},
    )  # fmt: skip
    house.run()
    assert house.answers("B") == [whole[0], whole[1], whole[2][:5]]


def test_a_row_error_of_the_prompt_ends_all_answers(build):
    house = build(64, 4)
    house.submit("A", prompt=9, max_tokens=8, n=3)
    house.step(failing_rows={house.sequence("A").sequence_id})
    assert finishes(house, "A") == [FinishReason.ERROR] * 3


def test_a_gateway_that_missed_something_of_one_answer_gets_it_again(build):
    house = build(64, 4)
    gateway = house.gateways[b"g"]
    house.submit("A", prompt=5, max_tokens=6, n=2, ignore_eos=True)
    house.step()
    gateway.is_deaf = gateway.may_gap = True
    house.run()
    gateway.is_deaf = False
    house.beat("A")
    house.beat("A")
    assert house.answers("A") == house.solos("A")
    assert finishes(house, "A") == [FinishReason.LENGTH] * 2
    house.cancel("A", CancelReason.STOP_STRING, 1)
    assert house.replies(Finished)[0].sequence == 1


@pytest.mark.parametrize("reason", list(CancelReason))
def test_one_answer_of_a_request_that_is_not_even_checked_is_given_up(build, reason):
    house = build(64, 4, join=False)
    house.submit("A", prompt=5, max_tokens=6, n=3, ignore_eos=True)
    house.cancel("A", reason, 1)
    house.join()
    house.run()
    solos = house.solos("A")
    assert house.answers("A") == [solos[0], (), solos[2]]


def test_a_client_that_wants_one_answer_less_is_told_nothing_more_of_it(build):
    house = build(64, 4)
    house.submit("A", prompt=8, max_tokens=9, n=3, ignore_eos=True)
    house.step(2)
    used = house.core.usage().num_used
    house.cancel("A", CancelReason.CLIENT_GONE, 2)
    assert house.commands == []
    house.step()
    assert house.core.usage().num_used == used - 1
    house.run()
    assert house.answers("A") == [*house.solos("A")[:2], house.solo("A", index=2)[:2]]
    assert house.finish("A", index=2) is None
    assert house.status("A") is Status.FINISHED


def test_the_lead_may_end_when_all_that_the_others_share_is_nothing(build):
    """Of a prompt shorter than a block they share no block; their empty tables are tables."""
    house = build(32, 4)
    so_far = (GeneratedSequence((5, 6)), GeneratedSequence((7, 9)))
    house.submit("A", prompt=3, max_tokens=8, n=2, ignore_eos=True, extra={"generated": so_far})
    assert house.table("A", 1) == ()
    house.stop_string("A")
    assert house.status("A") is Status.RUNNING
    house.run()
    assert len(house.tokens("A", index=1)) == 8
