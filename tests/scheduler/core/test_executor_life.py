"""Executors that join, vanish, fail a row or a plan, come back smaller, or answer too late."""

from dataclasses import replace

import pytest

from services.scheduler.core.events import StepFinished, StepRefused
from services.scheduler.core.lifecycle import Status
from shared.ids import Boot
from shared.messages import Accepted, StepFailed
from shared.sampling import FinishReason
from tests.scheduler.core.toys import VOCAB


def some_at_work(house, names="ABC", **params):
    for name in names:
        house.submit(name, **{"prompt": 6, "max_tokens": 8, "ignore_eos": True, **params})
    return house


def test_without_an_executor_requests_wait(build):
    house = build()
    house.lose_executor()
    some_at_work(house)
    assert (house.core.num_waiting, house.plans) == (3, [])
    house.join()
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_an_executor_lost_means_recompute_everybody_and_nobody_notices_but_the_clock(house):
    some_at_work(house)
    house.step(4)
    running, free = house.core.num_running, house.free
    assert running == 3
    assert free < 16
    house.lose_executor()
    assert (house.core.num_running, house.core.num_waiting, house.free) == (0, 3, 16)
    house.join()
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)
        assert house.stream(name).num_finished == 1
    assert house.core.counters.plans_lost == 1
    assert house.core.counters.preemptions.total() == 0


def test_an_executor_that_joins_again_was_lost_meanwhile(house):
    some_at_work(house)
    house.step(2)
    house.join()
    assert house.core.counters.executor_losses == 1
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_to_lose_an_executor_twice_is_to_lose_it_once(house):
    house.lose_executor()
    house.lose_executor()
    assert house.core.counters.executor_losses == 1
    house.join()


def test_blocks_of_a_cancelled_request_come_back_with_the_loss_of_its_plan(house):
    some_at_work(house)
    house.step()
    house.cancel("A")
    assert house.free < 16
    house.lose_executor()
    assert house.free == 16
    house.join()


def test_results_that_nobody_waits_for_are_dropped(house):
    some_at_work(house)
    plan = house.in_flight[0]
    result = house.executor.run(plan)
    for stranger in (
        replace(result, boot=Boot(1)), replace(result, step_id=plan.step_id + 1),
        replace(result, step_id=0),
    ):  # fmt: skip
        assert house.handle(StepFinished(house.later(), stranger)) == []
        failed = StepFailed(stranger.boot, stranger.step_id, "no")
        assert house.handle(StepRefused(house.later(), failed)) == []
    house.step()
    house.handle(StepFinished(house.later(), result))  # a second time
    assert house.core.counters.results_dropped == 7
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_a_result_of_the_executor_before_is_dropped(house):
    some_at_work(house)
    house.step(2)
    late = house.executor.run(house.in_flight[0])
    house.lose_executor()
    house.join()
    house.handle(StepFinished(house.later(), late))
    assert house.core.counters.results_dropped == 1
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_a_row_error_ends_that_request_alone(house):
    some_at_work(house)
    house.step(2)
    failing = house.sequence("B").sequence_id
    house.step(failing_rows={failing})
    finished = house.stream("B").finished
    assert (finished.reason, finished.error) == (FinishReason.ERROR, "logits are not numbers")
    house.run()
    for name in "AC":
        assert house.tokens(name) == house.solo(name)
    assert house.core.counters.row_errors == 1


def test_a_row_error_in_the_middle_of_a_prompt_ends_it_too(build):
    house = build(max_num_batched_tokens=4)
    house.submit("A", prompt=10)
    house.step(failing_rows={house.sequence("A").sequence_id})
    assert house.finish("A") is FinishReason.ERROR


def test_a_refused_plan_ends_its_requests_and_no_others(build):
    house = build(max_num_seqs=2)
    some_at_work(house)
    house.step()
    assert house.status("C") is Status.WAITING
    house.refuse_step("block 99 is out of range")
    for name in "AB":
        assert house.finish(name) is FinishReason.ERROR
        assert "block 99 is out of range" in house.stream(name).finished.error
    assert house.status("C") is Status.RUNNING
    house.run()
    assert house.tokens("C") == house.solo("C")
    assert house.core.counters.plans_refused == 1


def test_a_request_at_which_three_executors_died_ends_with_an_error(house):
    house.submit("A", max_tokens=4, ignore_eos=True)
    for _ in range(3):
        assert house.status("A") is Status.RUNNING
        house.lose_executor()
        house.join()
    assert house.finish("A") is FinishReason.ERROR
    assert "lost 3 times in a row" in house.stream("A").finished.error


def test_after_two_losses_a_request_is_tried_alone_until_it_is_past_that_point(house):
    some_at_work(house)
    house.step()
    house.step()
    for _ in range(2):
        house.lose_executor()
        house.join()
    alone = []
    for _ in range(3):
        alone.append(set(house.rows()))
        house.step()
    assert alone == [{"A"}, {"B"}, {"C"}]
    assert set(house.rows()) == {"A", "B", "C"}
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_a_suspect_with_a_long_prompt_has_all_its_chunks_alone(build):
    house = build(max_num_batched_tokens=4)
    some_at_work(house, "AB", prompt=10)
    for _ in range(2):
        house.step(2)
        assert house.rows() == {"A": (8, 2, 1), "B": (0, 2, 0)}
        house.lose_executor()
        house.join()
    alone = []
    for _ in range(6):
        alone.append(house.rows())
        house.step()
    assert alone == [
        {"A": (0, 4, 0)}, {"A": (4, 4, 0)}, {"A": (8, 2, 1)},
        {"B": (0, 4, 0)}, {"B": (4, 4, 0)}, {"B": (8, 2, 1)},
    ]  # fmt: skip
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_a_token_clears_a_request_of_suspicion(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    for _ in range(5):
        house.lose_executor()
        house.join()
        house.step()
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_killer_is_found_and_the_others_live(build):
    """B kills its executor whenever it computes its third token."""
    house = build(num_blocks=32)
    some_at_work(house, "ABCD")
    losses = 0
    while house.in_flight:
        killer = house.core.book.get("B")
        rows = {row.sequence_id for row in house.in_flight[0].rows}
        sequence = killer.sequences[0]
        if sequence.finish is None and sequence.sequence_id in rows and len(house.tokens("B")) == 2:
            losses += 1
            house.lose_executor()
            house.join()
        else:
            house.step()
    assert losses == 3
    assert house.finish("B") is FinishReason.ERROR
    for name in "ACD":
        assert house.tokens(name) == house.solo(name)


def test_a_smaller_pool_ends_what_no_longer_fits_and_says_why(house):
    house.submit("A", prompt=6, max_tokens=40, ignore_eos=True)
    house.submit("B", prompt=6, max_tokens=8, ignore_eos=True)
    house.step(3)
    house.lose_executor()
    house.join(num_blocks=5)
    finished = house.stream("A").finished
    assert finished.reason is FinishReason.ERROR
    assert "needs 12 blocks of 4 tokens; the KV pool has 5" in finished.error
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_a_defaulted_limit_is_lowered_with_the_pool(house):
    house.submit("A", prompt=6, max_tokens=None, ignore_eos=True)
    assert house.stream("A").max_tokens == 59
    house.step(3)
    house.lose_executor()
    house.join(num_blocks=3)
    assert house.replies(Accepted)[0].max_tokens == 7
    house.run()
    assert house.tokens("A") == house.solo("A", 7)


def test_a_defaulted_limit_below_what_is_generated_ends_the_answer(house):
    house.submit("A", prompt=6, max_tokens=None, ignore_eos=True)
    house.step(9)
    house.lose_executor()
    house.join(num_blocks=2)
    assert house.finish("A") is FinishReason.LENGTH


def test_a_smaller_vocabulary_ends_whoever_uses_more(house):
    house.submit("A", prompt=(VOCAB - 1, 2), max_tokens=8)
    house.submit("B", prompt=(1, 2), max_tokens=8)
    house.lose_executor()
    house.join(vocab=VOCAB - 1)
    assert "not in the vocabulary" in house.stream("A").finished.error
    assert house.status("B") is Status.RUNNING
    house.lose_executor()
    house.join()


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_another_block_size_changes_no_answer(house, block_size):
    some_at_work(house)
    house.step(3)
    house.lose_executor()
    house.join(num_blocks=64 // block_size, block_size=block_size)
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_what_a_lost_executor_took_is_no_cost_of_giving_way(build):
    """B gave way and was to compute its tokens again; now it would have to in any case."""
    house = build(4, 4, preemption_mode="recompute")
    house.submit("A", prompt=6, max_tokens=5, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    while not house.sequence("B").num_lost:
        house.step()
    house.lose_executor()
    assert house.sequence("B").num_lost == 0
    house.join()
    while house.in_flight:
        assert house.core.steps.in_flight[0].num_again == 0 or house.in_flight[0].step_id > 5
        house.step()


def test_another_eos_is_heeded_by_those_who_live(house):
    house.submit("A", prompt=6, max_tokens=8, min_tokens=6)
    house.lose_executor()
    house.join(eos=(7, 8))
    assert house.plans[-1].rows[0].samples[0].banned_ids == (7, 8)
