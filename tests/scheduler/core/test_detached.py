"""Streams without a reader: they go on, are kept for a time, and are bounded."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import Attached, Refused
from shared.sampling import NO_DRAW, FinishReason


def counted(house):
    """(taken over, orphaned, expired, evicted)."""
    counters = house.core.counters
    return (
        counters.streams_attached,
        counters.streams_orphaned,
        counters.streams_expired,
        counters.streams_evicted,
    )


def left(house, *names, **wish):
    """Streams of two tokens that are over, their clients having left one after the other."""
    for name in names:
        house.submit(name, **{"max_tokens": 2, "ignore_eos": True, **wish})
    house.run()
    for name in names:
        house.detach(name)


def kept(house, names):
    return "".join(name for name in names if house.status(name) is not None)


# ------------------------------------------------------------------ going on


@pytest.mark.parametrize("n", [1, 3])
def test_a_lost_gateways_streams_go_on_and_another_one_gets_all_of_them(house, n):
    house.submit("A", max_tokens=6, ignore_eos=True, gateway="g", n=n)
    house.step(2)
    held = house.answers("A")
    house.lose_gateway("g")
    assert (house.status("A"), house.core.num_detached) == (Status.RUNNING, 1)
    house.run()
    assert house.answers("A") == held  # the dead are told nothing
    house.attach("A", "h")
    assert house.answers("A", "h") == house.solos("A")
    assert house.finish("A", "h") is FinishReason.LENGTH
    assert (counted(house), house.core.num_detached) == ((1, 1, 0, 0), 0)


def test_a_client_that_left_finds_its_stream_where_it_is_by_now(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.step()
    house.detach("A")
    house.step(2)
    house.attach("A", "h")
    assert len(house.replies(Attached)[0].sequences[0].token_ids) == 3
    house.run()
    assert house.tokens("A", "h") == house.solo("A")


def test_it_may_come_back_to_the_gateway_it_left(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.step()
    house.detach("A")
    house.run()
    house.attach("A", "g")
    assert house.tokens("A") == house.solo("A")
    house.done("A")
    assert house.status("A") is None


def test_a_beam_search_goes_on_without_a_reader(house):
    house.submit("A", max_tokens=4, n=2, use_beam_search=True, ignore_eos=True, draw=NO_DRAW)
    house.step()
    house.lose_gateway()
    house.run()
    house.attach("A", "h")
    assert house.answers("A", "h") == house.solos("A")


def test_a_gateway_that_was_taken_for_dead_goes_on_where_it_was(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.step(2)
    house.lose_gateway("g")
    house.step(2)
    house.gateways[b"g"].may_gap = True
    house.beat("A")
    assert house.core.num_detached == 0
    house.beat("A")
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_gateway_has_nothing_more_to_say_of_what_it_detached(house):
    """Its words about tokens that were on their way come after it, and end nothing."""
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.step()
    house.detach("A")
    house.cancel("A")
    house.done("A")
    house.beat("A")
    assert house.replies(Refused)[0].code is ErrorCode.MOVED
    house.run()
    house.attach("A", "h")
    assert house.tokens("A", "h") == house.solo("A")


def test_only_its_own_gateway_detaches_a_stream(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.detach("A", "h")
    assert house.core.num_detached == 0
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_what_is_no_stream_is_forgotten(house):
    house.submit("A", max_tokens=6, ignore_eos=True, context=b"")
    house.detach("A")
    assert house.status("A") is None


def test_who_leaves_before_a_model_is_known_is_forgotten(build):
    house = build(join=False)
    house.submit("A")
    house.detach("A")
    assert house.core.num_waiting == 0


# ------------------------------------------------------------------ time


def test_a_request_that_still_runs_at_its_time_to_live_is_cancelled(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=50, ignore_eos=True)
    house.step()
    house.detach("A")
    house.tick(9.9)
    assert house.status("A") is Status.RUNNING
    house.tick(0.2)
    assert house.status("A") is None
    assert counted(house) == (0, 0, 1, 0)
    house.run()
    assert house.free == house.num_blocks
    house.attach("A", "h")
    assert house.stream("A", "h").refused.code is ErrorCode.UNKNOWN_STREAM


def test_one_that_ends_is_kept_for_the_same_time_from_its_end(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=3, ignore_eos=True)
    house.detach("A")
    house.tick(8.0)
    house.run()
    house.tick(9.9)
    assert house.status("A") is Status.FINISHED
    house.tick(0.2)
    assert (house.status("A"), counted(house)) == (None, (0, 0, 1, 0))


def test_nobody_is_missed_who_was_told_all(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=1, ignore_eos=True)
    house.run()
    house.detach("A", is_told=True)
    house.tick(9.9)
    assert house.status("A") is Status.FINISHED
    house.tick(0.2)
    assert (house.status("A"), counted(house)) == (None, (0, 0, 0, 0))


def test_who_came_back_is_not_bound_by_the_time_any_more(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=5, ignore_eos=True)
    house.detach("A")
    house.attach("A", "h")
    house.tick(100.0)
    house.run()
    assert house.tokens("A", "h") == house.solo("A")


# ------------------------------------------------------------------ bounds


def test_beyond_so_many_the_oldest_that_are_over_go(build):
    house = build(max_detached_streams=3)
    left(house, *"ABCDE")
    house.tick()
    assert kept(house, "ABCDE") == "CDE"
    assert counted(house) == (0, 0, 0, 2)


def test_first_go_those_whose_clients_were_told_all_and_last_who_still_runs(build):
    house = build(max_detached_streams=2, num_blocks=40)
    house.submit("R", max_tokens=50, ignore_eos=True)
    house.detach("R")
    for name in "AB":
        house.submit(name, max_tokens=1, ignore_eos=True)
    house.step(2)
    house.detach("A")
    house.detach("B", is_told=True)
    house.tick()
    assert kept(house, "RAB") == "RA"
    house.submit("C", max_tokens=1, ignore_eos=True)
    house.step(2)
    house.detach("C")
    house.tick()
    assert kept(house, "RAC") == "RC"


def test_their_memory_is_bounded_too(build):
    house = build(num_blocks=200, max_detached_bytes=2**16)
    left(house, *"ABCDE", max_tokens=200)
    sizes = house.core.num_detached_bytes
    house.tick()
    assert 5 * 200 * 40 < sizes < 2**17
    assert kept(house, "ABCDE") == "".join("ABCDE"[-(house.core.num_detached) :])
    assert sizes / 5 < house.core.num_detached_bytes <= 2**16


def test_one_that_grows_without_a_reader_is_measured_as_it_grows(build):
    house = build(num_blocks=200, max_detached_bytes=2**13)
    house.submit("A", max_tokens=200, ignore_eos=True)
    house.step()
    house.detach("A")
    house.tick()
    assert house.status("A") is Status.RUNNING
    house.step(150)
    house.tick()
    assert (house.status("A"), counted(house)) == (None, (0, 0, 0, 1))


def test_log_probabilities_count(build):
    house = build(num_blocks=200)
    left(house, "A", max_tokens=20)
    bare = house.core.num_detached_bytes
    left(house, "B", max_tokens=20, logprobs=5)
    assert house.core.num_detached_bytes - bare > bare + 20 * 5 * 50
