"""Who is late ends with an error of its own, whatever it is at, and its blocks are free at once."""

import math

import pytest

from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import Accepted, Finished, GeneratedSequence, Refused
from shared.sampling import NO_DRAW, FinishReason


def submit(house, name, deadline_s, **kwargs):
    """A request that must be over after so many seconds."""
    extra = {"deadline_s": deadline_s, **kwargs.pop("extra", {})}
    house.submit(name, extra=extra, **{"ignore_eos": True, **kwargs})


def is_late(house, name, num_tokens, index=0):
    """Whether it ended with the error of a deadline, and says after how many tokens."""
    finished = house.stream(name, index=index).finished
    assert finished is not None
    assert (finished.reason, finished.code) == (FinishReason.ERROR, ErrorCode.DEADLINE)
    assert finished.error.startswith("deadline_s of ")
    assert finished.error.endswith(f" s passed after {num_tokens} tokens")
    return True


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.inf, math.nan])
def test_a_deadline_is_a_finite_number_above_zero(house, deadline_s):
    submit(house, "A", deadline_s)
    (refused,) = house.replies(Refused)
    assert (refused.code, refused.param) == (ErrorCode.INVALID, "deadline_s")


def test_a_running_request_ends_at_the_first_tick_after_its_deadline(house):
    submit(house, "A", 5.0, prompt=6, max_tokens=50)
    house.step(3)
    house.tick(4.9)
    assert house.status("A") is Status.RUNNING
    held = {block_id for block_id, _ in house.table("A")}
    house.tick(0.2)
    assert is_late(house, "A", 3)
    assert house.stream("A").finished.error == "deadline_s of 5 s passed after 3 tokens"
    pool = house.core.steps.holdings.allocator.pool
    assert set(pool.settling_blocks) == held, "its plan in flight may still write there (law 2)"
    house.step()
    assert house.free == 16
    assert len(house.tokens("A")) == 3, "what the plan in flight drew is not wanted"
    counters = house.core.counters
    assert (counters.deadlines_passed, counters.requests_finished[FinishReason.ERROR]) == (1, 1)


def test_what_a_late_request_held_is_there_for_the_next(build):
    house = build(num_blocks=4, block_size=4)
    submit(house, "A", 1.0, prompt=12, max_tokens=4)
    submit(house, "B", 9.0, prompt=12, max_tokens=4)
    assert house.status("B") is Status.WAITING
    house.tick(2.0)
    assert is_late(house, "A", 0)
    house.step()
    assert house.status("B") is Status.RUNNING
    house.run()
    assert house.answers("B") == house.solos("B")


def test_waiting_and_swapped_requests_end_as_well(build):
    house = build(num_blocks=4, block_size=4, num_cpu_blocks=8, preemption_mode="swap")
    submit(house, "A", 60.0, prompt=7, max_tokens=9)
    submit(house, "B", 1.0, prompt=7, max_tokens=9)
    submit(house, "C", 1.0, prompt=7, max_tokens=9)
    house.step(3)
    assert [house.status(name) for name in "BC"] == [Status.SWAPPED, Status.WAITING]
    num_tokens = len(house.tokens("B"))
    house.tick(2.0)
    assert is_late(house, "B", num_tokens)
    assert is_late(house, "C", 0)
    house.run()
    assert house.core.cpu_usage().num_free == 8
    assert house.answers("A") == house.solos("A")


def test_every_answer_of_a_request_ends_and_one_that_had_ended_stays_as_it_was(house):
    submit(house, "A", 1.0, max_tokens=12, n=3)
    house.step(2)
    house.stop_string("A", index=1)
    house.tick(2.0)
    assert house.finish("A", index=1) is FinishReason.STOP
    assert is_late(house, "A", 6)
    assert is_late(house, "A", 6, index=2)
    assert house.core.counters.deadlines_passed == 1


def test_a_finished_request_is_never_touched(house):
    submit(house, "A", 1.0, max_tokens=2)
    house.run()
    house.tick(5.0)
    assert house.replies(Finished) == []
    assert (house.finish("A"), house.core.counters.deadlines_passed) == (FinishReason.LENGTH, 0)


def test_the_deadline_counts_from_the_clients_asking(house):
    submit(house, "A", 5.0, age_s=4.0, max_tokens=50)
    house.step()
    house.tick(0.5)
    assert house.status("A") is Status.RUNNING
    house.tick(0.6)
    assert is_late(house, "A", 1)


def test_who_is_late_when_it_comes_ends_at_once_with_what_it_has(house):
    so_far = {"generated": (GeneratedSequence((3, 4)),), "resubmitted": True}
    submit(house, "A", 5.0, age_s=5.1, extra=so_far)
    assert len(house.replies(Accepted)) == 1
    assert is_late(house, "A", 2)
    assert house.plans == []


def test_who_is_late_when_it_comes_and_had_ended_before_ends_as_it_had(house):
    so_far = {"generated": (GeneratedSequence((3, 4), FinishReason.STOP),), "resubmitted": True}
    submit(house, "A", 5.0, age_s=5.1, extra=so_far)
    assert house.finish("A") is FinishReason.STOP
    assert house.core.counters.deadlines_passed == 0


def test_before_a_model_is_known_it_is_refused_and_its_place_in_the_queue_is_free(build):
    house = build(join=False, max_num_queued_reqs=2)
    submit(house, "A", 1.0)
    submit(house, "B", 9.0)
    house.tick(1.1)
    (refused,) = house.replies(Refused)
    assert (refused.request_id, refused.code) == ("A", ErrorCode.DEADLINE)
    assert refused.message == "deadline_s of 1 s passed before any model was loaded"
    assert house.core.num_queued == 1
    submit(house, "C", 1.0, age_s=1.0)
    assert house.replies(Refused)[0].code is ErrorCode.DEADLINE
    house.later(9.0)
    house.join()
    assert house.replies(Refused)[0].request_id == "B"
    assert house.plans == []
    assert house.core.counters.requests_refused[ErrorCode.DEADLINE] == 3
    assert house.core.counters.deadlines_passed == 3


def test_while_the_executor_is_away_deadlines_pass_too(house):
    submit(house, "A", 2.0, max_tokens=50)
    house.step(2)
    house.lose_executor()
    house.tick(3.0)
    assert is_late(house, "A", 2)
    house.join()
    assert len(house.plans) == 3, "nothing is computed again for it"


def test_a_gateway_that_takes_the_stream_over_is_told(house):
    submit(house, "A", 2.0, max_tokens=50)
    house.step(2)
    house.tick(3.0)
    house.attach("A", "h")
    attached = house.stream("A", "h").attached
    assert attached.sequences[0].finish is FinishReason.ERROR
    assert house.stream("A", "h").finished.code is ErrorCode.DEADLINE


def test_beams_end_too_and_give_their_blocks_back(house):
    beams = {"draw": NO_DRAW, "use_beam_search": True}
    submit(house, "A", 1.0, prompt=6, max_tokens=9, n=3, ignore_eos=False, **beams)
    house.step(4)
    assert len(house.core.book.get("A").beams) == 3
    house.tick(2.0)
    assert all(is_late(house, "A", 0, index) for index in range(3))
    house.step()
    assert house.free == 16
