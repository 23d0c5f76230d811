"""Clients that leave, stop strings, gateways that vanish: blocks come back, once it is safe."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.messages import CancelReason, Finished, Tokens
from shared.sampling import FinishReason

GONE = CancelReason.CLIENT_GONE


def test_blocks_of_a_plan_in_flight_come_back_only_at_its_result(house):
    house.submit("A", prompt=9, max_tokens=5, ignore_eos=True)
    assert house.free == 13
    house.cancel("A")
    assert (house.status("A"), house.free) == (None, 13)  # forgotten, but the executor writes on
    assert house.commands == []
    house.step()
    assert house.free == 16
    assert house.replies(Tokens) == []


def test_a_plan_in_flight_does_not_hold_back_others_from_being_planned_with_other_blocks(build):
    house = build(num_blocks=6, block_size=4)
    house.submit("A", prompt=16, max_tokens=2, ignore_eos=True)
    house.cancel("A")
    house.submit("B", prompt=12, max_tokens=2, ignore_eos=True)  # three blocks; two are free
    assert house.status("B") is Status.WAITING
    house.step()
    assert house.status("B") is Status.RUNNING
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_a_waiting_request_is_forgotten_at_once(build):
    house = build(max_num_seqs=1)
    house.submit("A", max_tokens=3)
    house.submit("B")
    house.cancel("B")
    assert house.core.num_waiting == 0
    assert house.core.counters.requests_finished == {FinishReason.ABORT: 1}


def test_a_client_that_is_gone_hears_nothing_more(house):
    house.submit("A", max_tokens=30, ignore_eos=True)
    house.submit("B", max_tokens=30, ignore_eos=True)
    house.step(3)
    held = house.tokens("A")
    house.cancel("A")
    house.run()
    assert (house.tokens("A"), house.finish("A")) == (held, None)
    assert house.tokens("B") == house.solo("B")


def test_a_stop_string_ends_the_answer_where_it_is(house):
    house.submit("A", max_tokens=30, ignore_eos=True)
    house.step(4)
    house.stop_string("A")
    finished = house.replies(Finished)[0]
    assert (finished.reason, finished.length, finished.stop_token_id) == (
        FinishReason.STOP,
        4,
        None,
    )
    assert finished.usage.completion_tokens == 4
    assert house.status("A") is Status.FINISHED
    house.step()  # the result of the plan that was in flight
    assert house.tokens("A") == house.solo("A")[:4]
    assert (house.free, house.in_flight) == (16, [])


def test_a_stop_string_of_the_whole_request_or_of_its_only_sequence_is_the_same(house):
    for name, sequence in (("A", None), ("B", 0)):
        house.submit(name, max_tokens=9, ignore_eos=True)
        house.cancel(name, CancelReason.STOP_STRING, sequence)
        assert house.finish(name) is FinishReason.STOP


def test_a_stop_string_that_comes_after_the_end_hears_of_that_end_again(house):
    house.submit("A", max_tokens=2, ignore_eos=True)
    house.run()
    house.stop_string("A")
    assert house.replies(Finished)[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("reason", list(CancelReason))
def test_giving_up_a_sequence_that_is_not_there_changes_nothing(house, reason):
    house.submit("A", max_tokens=4, ignore_eos=True)
    house.cancel("A", reason, sequence=1)
    house.cancel("A", reason, sequence=-1)
    house.cancel("nobody", reason)
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_only_its_own_gateway_gives_a_request_up(house):
    house.submit("A", max_tokens=4, ignore_eos=True, gateway="g")
    for reason in CancelReason:
        house.cancel("A", reason, gateway="h")
    house.done("A", gateway="h")
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_lost_gateway_takes_along_what_has_no_stream_and_nobody_elses(build):
    house = build(max_num_seqs=3)
    for name, gateway in (("A", "g"), ("B", "h"), ("C", "g"), ("D", "g")):
        house.submit(name, max_tokens=6, ignore_eos=True, gateway=gateway, context=b"")
    house.step(2)
    house.lose_gateway("g")
    assert [house.status(name) for name in "ABCD"] == [None, Status.RUNNING, None, None]
    house.run()
    assert house.tokens("B", "h") == house.solo("B")
    assert house.core.counters.requests_finished[FinishReason.ABORT] == 3


def test_done_drops_the_log_of_a_finished_request(house):
    house.submit("A", max_tokens=2, ignore_eos=True)
    house.run()
    assert house.core.num_finished_kept == 1
    house.done("A")
    assert (house.core.num_finished_kept, house.status("A")) == (0, None)


def test_done_of_a_live_request_gives_it_up(house):
    house.submit("A", max_tokens=20, ignore_eos=True)
    house.done("A")
    house.run()
    assert house.status("A") is None


def test_an_id_can_be_used_again_while_its_first_plan_is_still_in_flight(house):
    house.submit("A", prompt=9, max_tokens=5, ignore_eos=True)
    house.cancel("A")
    house.submit("A", prompt=(4, 5, 6), max_tokens=5, ignore_eos=True)
    house.run()
    assert house.tokens("A") == house.solo("A")


@pytest.mark.parametrize("how", ["cancel", "lose_gateway", "done"])
def test_r22_300_streams_cut_after_three_tokens_leave_nothing(build, how):
    house = build(num_blocks=120, block_size=4, max_num_seqs=64)
    for at in range(300):
        house.submit(f"A{at}", prompt=3 + at % 7, max_tokens=20, ignore_eos=True, context=b"")
    cut = set()
    while house.in_flight:
        house.step()
        ready = [f"A{at}" for at in range(300) if len(house.tokens(f"A{at}")) >= 3]
        if how == "lose_gateway":
            if len(ready) > 100:
                house.lose_gateway()
                cut.update(f"A{at}" for at in range(300))
            continue
        for name in ready:
            if name not in cut:
                getattr(house, how)(name)
                cut.add(name)
    assert len(cut) == 300
    core = house.core
    assert (core.num_running, core.num_waiting, core.num_swapped) == (0, 0, 0)
    assert house.free == 120
    assert len(core.book) == 0
