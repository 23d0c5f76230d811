"""A queue with an end: who is refused, in which words, and who never is."""

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.queue_limits import QueueLimits
from shared.errors import ErrorCode, StartError
from shared.ids import Boot
from shared.messages import Refused
from shared.sampling import FinishReason


@pytest.fixture
def busy(build):
    """One request runs and keeps everybody waiting; two may wait, with 20 prompt tokens."""

    def build_busy(**config):
        house = build(max_num_seqs=1, **{"max_num_queued_reqs": 2, **config})
        house.submit("R", prompt=5, max_tokens=6, ignore_eos=True)
        return house

    return build_busy


def full(house, name):
    """The refusal of a request for which there was no room; nothing of it is kept."""
    (refusal,) = house.replies(Refused)
    assert refusal.request_id == name
    assert refusal.code is ErrorCode.QUEUE_FULL
    assert house.status(name) is None
    assert 1.0 <= refusal.retry_after_s <= 60.0
    return refusal


def queue(house):
    return house.core.num_queued, house.core.num_queued_tokens


def test_a_request_beyond_the_limit_is_refused_with_both_numbers_and_what_to_do(busy):
    house = busy()
    house.submit("A")
    house.submit("B")
    house.submit("C")
    message = full(house, "C").message
    assert "2 requests wait, at most 2 may (--max-num-queued-reqs)" in message
    assert "try again later" in message
    assert house.core.counters.requests_refused == {ErrorCode.QUEUE_FULL: 1}
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_what_runs_is_not_in_the_queue_and_room_comes_back_as_requests_start(busy):
    house = busy()
    assert (queue(house), house.core.num_running) == ((0, 0), 1)
    house.submit("A", prompt=4)
    house.submit("B", prompt=7)
    assert queue(house) == (2, 11)
    while house.status("A") is Status.WAITING:
        house.step()
    assert queue(house) == (1, 7)
    house.submit("C", prompt=3)
    assert (queue(house), house.status("C")) == ((2, 10), Status.WAITING)


def test_room_comes_back_as_clients_leave(busy):
    house = busy()
    house.submit("A")
    house.submit("B", gateway="h", context=b"")
    house.cancel("A")
    house.lose_gateway("h")
    assert queue(house) == (0, 0)
    house.submit("C")
    assert house.status("C") is Status.WAITING


def test_prompt_tokens_are_limited_together(busy):
    house = busy(max_num_queued_reqs=9, max_num_queued_tokens=20)
    house.submit("A", prompt=12)
    house.submit("B", prompt=9)
    message = full(house, "B").message
    assert "12 prompt tokens wait and this prompt has 9, at most 20 may" in message
    assert "--max-num-queued-tokens" in message
    house.submit("C", prompt=8)
    assert queue(house) == (2, 20)


def test_an_empty_queue_takes_a_prompt_over_the_limit_or_it_could_never_run(busy):
    house = busy(max_num_queued_tokens=20)
    house.submit("A", prompt=21)
    assert house.status("A") is Status.WAITING
    house.submit("B", prompt=1)
    full(house, "B")
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_what_gave_way_and_waits_to_come_back_is_not_in_the_queue(build):
    house = build(num_blocks=4, block_size=4, max_num_queued_reqs=1)
    house.submit("A", prompt=6, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    while house.status("B") is not Status.WAITING or not house.sequence("B").generated:
        house.step()
    assert (house.core.num_waiting, queue(house)) == (1, (0, 0))
    house.submit("C", prompt=2, max_tokens=2)
    assert house.status("C") is Status.WAITING
    house.submit("D", prompt=2, max_tokens=2)
    full(house, "D")


def test_what_an_executor_loss_sends_back_is_not_in_the_queue(build):
    house = build(max_num_queued_reqs=1)
    house.submit("A")
    house.lose_executor()
    assert (house.core.num_waiting, queue(house)) == (1, (0, 0))
    house.submit("B")
    house.submit("C")
    full(house, "C")
    house.join()
    house.run()


def test_a_resubmitted_request_is_never_refused_by_limits_but_counts(busy):
    house = busy(max_num_queued_tokens=20)
    for name in "ABCD":
        house.submit(name, prompt=9, extra={"resubmitted": True})
    assert queue(house) == (4, 36)
    house.submit("E", prompt=1)
    full(house, "E")
    house.run()
    for name in "ABCD":
        assert house.tokens(name) == house.solo(name)


def test_a_request_that_is_here_and_comes_again_is_never_refused_by_limits(busy):
    house = busy(max_num_queued_reqs=1)
    house.submit("A", gateway="g")
    house.submit("A", gateway="h")
    assert house.replies(Refused) == []
    assert queue(house)[0] == 1
    house.run()
    assert house.tokens("A", "h") == house.solo("A")


def test_before_a_model_is_known_the_queue_has_the_same_end(build):
    house = build(join=False, max_num_queued_reqs=3, max_num_queued_tokens=20)
    house.submit("A", prompt=8)
    house.submit("B", prompt=8, gateway="h")
    house.submit("C", prompt=8)
    full(house, "C")
    house.submit("A", prompt=8)  # again: the same place
    assert queue(house) == (2, 16)
    house.submit("D", prompt=4)
    house.submit("E", prompt=1)
    assert "3 requests wait" in full(house, "E").message
    house.lose_gateway("h")
    house.cancel("D")
    assert queue(house) == (1, 8)
    house.submit("F", prompt=50, extra={"resubmitted": True})
    assert queue(house) == (2, 58)
    house.join()  # nobody who was taken is refused now
    assert [house.status(name) for name in "AF"] == [Status.RUNNING, Status.RUNNING]


def test_before_a_model_is_known_nobody_takes_the_place_of_another_with_its_id(build):
    house = build(join=False)
    house.submit("A", prompt=(1, 2, 3), gateway="g")
    house.submit("A", prompt=(1, 2, 3, 4), gateway="h")
    assert house.stream("A", "h").refused.param == "request_id"
    house.join()
    house.submits["A"] = house.core.book.get("A").submit
    house.run()
    assert house.tokens("A", "g") == house.solo("A")


def test_a_request_that_ends_at_once_leaves_no_trace_in_the_queue(busy):
    house = busy()
    house.submit("A", max_tokens=0)
    assert (house.finish("A"), queue(house)) == (FinishReason.LENGTH, (0, 0))


# ------------------------------------------------------------------ when to come back


def drained(limits, seconds, per_second, start=0.0):
    """Time passes in tenths of a second while the queue drains evenly. Returns (now, total)."""
    for tick in range(int(seconds * 10) + 1):
        limits.tick(start + tick / 10, int(tick / 10 * per_second))
    return start + seconds, int(seconds * per_second)


def test_who_comes_back_is_told_how_fast_the_queue_drained_lately():
    limits = QueueLimits(1, 1)
    now, total = drained(limits, 30.0, 0.25)
    assert limits.retry_after_s(now, total) == pytest.approx(4.0, abs=1.0)


def test_the_more_were_refused_lately_the_later_the_next_is_told_to_come():
    limits = QueueLimits(1, 1)
    now, total = drained(limits, 30.0, 2.0)
    told = [limits.retry_after_s(now, total) for _ in range(200)]
    assert told == sorted(told)
    assert told[0] == 1.0
    assert told[19] == pytest.approx(10.0, abs=1.0)
    assert told[-1] == 60.0


def test_refusals_of_long_ago_are_forgotten():
    limits = QueueLimits(1, 1)
    now, total = drained(limits, 30.0, 2.0)
    for _ in range(200):
        limits.retry_after_s(now, total)
    for tick in range(300):
        limits.tick(now + tick / 10, total + tick // 5)
    assert limits.retry_after_s(now + 30.0, total + 60) == 1.0


def test_a_queue_that_does_not_move_is_worth_a_long_wait():
    limits = QueueLimits(1, 1)
    now, total = drained(limits, 40.0, 0.0)
    assert limits.retry_after_s(now, total) >= 10.0


def test_at_the_very_beginning_nothing_is_known_and_a_second_is_said():
    assert QueueLimits(1, 1).retry_after_s(5.0, 0) == 1.0


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_a_queue_without_room_is_refused_at_start_by_its_flag(name):
    with pytest.raises(StartError, match="--" + name.replace("_", "-")):
        SchedulerConfig(Boot(1), **{name: 0})
