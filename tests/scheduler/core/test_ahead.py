"""Two plans in flight: a step is planned while the one before it still runs."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.messages import PREVIOUS, Finished, PreemptionMode, Tokens
from shared.sampling import FinishReason
from tests.scheduler.core.walker import PENALTY


@pytest.fixture
def ahead(build):
    """A house with two plans in flight."""

    def build_ahead(num_blocks=32, block_size=4, **settings):
        return build(num_blocks, block_size, plans_in_flight=2, **settings)

    return build_ahead


def test_the_next_plan_says_previous_for_the_token_it_does_not_know(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=4, ignore_eos=True)
    assert [plan.step_id for plan in house.in_flight] == [1, 2]
    assert house.plans[1].rows[0].token_ids == (PREVIOUS,)
    assert house.plans[1].rows[0].first_position == 5
    house.step()
    assert [plan.step_id for plan in house.in_flight] == [2, 3]
    assert house.plans[2].rows[0].token_ids == (PREVIOUS,)
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_max_tokens_is_foreseen_so_no_row_goes_beyond_it(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=4, ignore_eos=True)
    house.run()
    assert len(house.plans) == 4
    assert house.core.counters.computed_tokens == 5 + 3
    assert house.finish("A") is FinishReason.LENGTH


def test_a_stop_token_is_not_foreseen_and_what_was_drawn_after_it_is_dropped(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=60, stop_token_ids=tuple(range(1, 9)))
    while house.finish("A") is None:
        house.step()
    assert house.finish("A") is FinishReason.STOP
    assert house.replies(Finished)[0].length == len(house.solo("A"))
    assert house.free < 32  # the plan in flight still writes for it
    house.step()
    assert house.replies(Tokens) == []
    assert (house.free, house.in_flight) == (32, [])
    assert house.tokens("A") == house.solo("A")


def test_a_chunk_of_a_prompt_needs_no_previous(ahead):
    house = ahead(max_num_batched_tokens=4)
    house.submit("A", prompt=10, max_tokens=2, ignore_eos=True)
    assert [len(plan.rows[0].samples) for plan in house.in_flight] == [0, 0]
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_penalty_gets_previous_as_the_last_of_its_history(ahead):
    house = ahead()
    house.submit("A", prompt=3, max_tokens=6, draw=PENALTY, ignore_eos=True)
    sample = house.plans[1].rows[0].samples[0]
    assert sample.history == (*house.submits["A"].prompt, PREVIOUS)
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_min_tokens_counts_what_is_drawn_in_flight(ahead):
    house = ahead()
    house.submit("A", prompt=3, max_tokens=6, min_tokens=2, stop_token_ids=(4, 5))
    banned = [plan.rows[0].samples[0].banned_ids for plan in house.plans]
    house.step()
    banned.append(house.plans[2].rows[0].samples[0].banned_ids)
    assert banned == [(0, 4, 5), (0, 4, 5), ()]
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_ban_is_lifted_again_by_a_loss(ahead):
    """The draw without a ban was lost with its executor; the one before it comes again."""
    house = ahead()
    house.submit("A", prompt=3, max_tokens=6, min_tokens=1, stop_token_ids=(4, 5))
    assert [bool(plan.rows[0].samples[0].banned_ids) for plan in house.plans] == [True, False]
    house.lose_executor()
    house.join()
    assert [bool(plan.rows[0].samples[0].banned_ids) for plan in house.plans[2:]] == [True, False]
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_forks_go_on_from_what_the_one_row_of_the_prompt_drew(ahead):
    house = ahead()
    house.submit("A", prompt=7, max_tokens=5, n=3, ignore_eos=True)
    rows = house.plans[1].rows
    assert [row.token_ids for row in rows] == [(PREVIOUS,)] * 3
    assert len(house.plans[1].copies) == 2
    house.run()
    assert house.answers("A") == house.solos("A")


def test_a_prompt_is_scored_two_chunks_ahead(ahead):
    house = ahead(max_num_batched_tokens=6, max_scored_tokens=4)
    house.submit("A", prompt=19, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    house.run()
    assert house.stream("A").prompt_logprobs == house.scores("A")
    assert house.tokens("A") == house.solo("A")


def test_a_hit_is_taken_only_from_a_plan_that_has_returned(ahead):
    house = ahead(max_num_batched_tokens=8, enable_prefix_caching=True)
    prompt = tuple(range(1, 31))
    for name in "AB":
        house.submit(name, prompt, max_tokens=5, ignore_eos=True)
    house.run()
    assert house.stream("B").finished.usage.cached_tokens == 28
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_token_drawn_in_flight_arrives_and_counts_though_its_request_gave_way(ahead, mode):
    house = ahead(4, preemption_mode=mode, num_cpu_blocks=9)
    house.submit("A", prompt=6, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=9, ignore_eos=True)
    arrived = 0
    while house.in_flight:
        request = house.core.book.get("B")
        is_out = request.status in (Status.WAITING, Status.SWAPPED)
        before = len(house.tokens("B"))
        house.step()
        arrived += is_out and len(house.tokens("B")) > before
    assert arrived > 0
    assert house.core.counters.preemptions[PreemptionMode(mode)] > 0
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_a_token_that_arrives_for_a_request_that_gave_way_may_end_it(ahead):
    house = ahead(4, preemption_mode="swap", num_cpu_blocks=9)
    house.submit("A", prompt=6, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=2, ignore_eos=True)
    while house.in_flight:
        house.step()
    assert house.core.cpu_usage().num_free == 9
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_both_plans_are_lost_with_their_executor_and_each_request_counts_once(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=6, ignore_eos=True)
    house.step()
    assert len(house.in_flight) == 2
    house.lose_executor()
    assert house.core.counters.plans_lost == 2
    assert house.core.book.get("A").num_losses == 1
    house.join()
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_suspects_steps_are_sent_one_by_one(ahead):
    house = ahead()
    for name in "AB":
        house.submit(name, prompt=5, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        house.lose_executor()
        house.join()
    assert len(house.in_flight) == 1
    assert {row.sequence_id for row in house.in_flight[0].rows} == {house.sequence("A").sequence_id}
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_a_row_error_ends_its_request_and_the_row_that_goes_on_from_it_harms_nobody(ahead):
    house = ahead()
    for name in "AB":
        house.submit(name, prompt=5, max_tokens=6, ignore_eos=True)
    house.step(3)
    house.step(failing_rows={house.sequence("A").sequence_id})
    assert house.finish("A") is FinishReason.ERROR
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_an_error_in_a_row_of_an_answer_that_has_ended_harms_no_sister(ahead):
    """A stop token is not foreseen: the plan in flight has a row that nobody wants any more."""
    house = ahead()
    house.submit("A", prompt=5, max_tokens=40, n=2, stop_token_ids=(8,), ignore_eos=True)
    while not any(ended := [house.finish("A", index=index) for index in (0, 1)]):
        house.step()
    assert None in ended, "the other goes on"
    surplus = house.sequence("A", 0 if ended[0] else 1).sequence_id
    assert surplus in {row.sequence_id for row in house.in_flight[0].rows}
    house.step(failing_rows={surplus})
    assert house.core.counters.row_errors == 1
    house.run()
    assert house.answers("A") == house.solos("A")
    assert FinishReason.ERROR not in [house.finish("A", index=index) for index in (0, 1)]


def test_an_error_in_a_row_that_others_draw_from_ends_them_though_its_own_answer_has_ended(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=8, n=2, ignore_eos=True)
    lead = house.sequence("A").sequence_id
    house.stop_string("A")
    house.step(failing_rows={lead})
    assert [house.finish("A", index=index) for index in (0, 1)] == [
        FinishReason.STOP, FinishReason.ERROR,
    ]  # fmt: skip


def test_a_refused_plan_ends_its_requests_and_who_was_only_in_the_next_computes_again(ahead):
    """The next plan goes on from draws that never were, so it is refused too."""
    house = ahead(max_num_batched_tokens=6)
    house.submit("A", prompt=5, max_tokens=6, ignore_eos=True)
    house.submit("B", prompt=5, max_tokens=6, ignore_eos=True)
    while not any(house.sequence("B").sequence_id == r.sequence_id for r in house.plans[-1].rows):
        house.step()
    first, second = house.in_flight
    b = house.sequence("B").sequence_id
    assert b not in {row.sequence_id for row in first.rows}
    assert b in {row.sequence_id for row in second.rows}
    house.refuse_step()
    assert house.finish("A") is FinishReason.ERROR
    house.run()
    assert house.core.counters.plans_refused == 2
    assert house.tokens("B") == house.solo("B")


def test_a_stop_string_that_comes_while_two_plans_name_it_frees_its_blocks_after_the_second(ahead):
    house = ahead()
    house.submit("A", prompt=5, max_tokens=30, ignore_eos=True)
    house.step(3)
    house.stop_string("A")
    free = house.free
    house.step()
    assert house.free == free
    house.step()
    assert house.free == 32
