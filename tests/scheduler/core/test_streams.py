"""What gateways hear: what was lost reaches them, what they hold already costs them nothing."""

from dataclasses import replace

import pytest

from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import Accepted, Attached, AttachedSequence, Finished, Refused, Tokens
from shared.sampling import FinishReason


def deaf(house, gateway="g", is_deaf=True):
    house.gateways[gateway.encode()].is_deaf = is_deaf
    house.gateways[gateway.encode()].may_gap = True


# ------------------------------------------------------------------ heartbeats


def test_a_heartbeat_of_a_stream_that_is_up_to_date_brings_nothing(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    for _ in range(3):
        house.step()
        assert house.beat("A") == []
    assert house.core.counters.resent_runs == 0


def test_tokens_on_their_way_are_not_sent_again_at_the_first_heartbeat(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    house.step(2)
    assert house.beat("A", positions=(0,)) == []


def test_a_stream_that_stands_still_for_two_heartbeats_gets_all_it_misses(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    house.step(2)
    deaf(house)
    house.step(3)
    deaf(house, is_deaf=False)
    house.beat("A")
    house.step()  # a gap: not taken
    assert len(house.tokens("A")) == 2
    house.beat("A")
    assert house.tokens("A") == house.solo("A")[:6]
    assert house.core.counters.resent_runs == 1
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_stream_that_is_slow_but_moves_is_left_alone(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    house.step(6)
    house.beat("A", positions=(1,))
    assert house.beat("A", positions=(2,)) == []
    assert house.beat("A", positions=(3,)) == []


def test_tokens_made_between_two_heartbeats_are_not_taken_for_lost(house):
    house.submit("A", max_tokens=9, ignore_eos=True)
    house.beat("A", positions=(0,))
    house.step(3)
    assert house.beat("A", positions=(0,)) == []


def test_a_lost_finish_is_said_again(house):
    house.submit("A", max_tokens=3, ignore_eos=True)
    house.step(2)
    deaf(house)
    house.run()
    deaf(house, is_deaf=False)
    assert house.beat("A") == []
    house.beat("A")
    assert house.tokens("A") == house.solo("A")
    assert house.finish("A") is FinishReason.LENGTH


def test_finished_is_repeated_until_done(house):
    house.submit("A", max_tokens=1, ignore_eos=True)
    house.run()
    for _ in range(4):
        house.beat("A")
    assert house.stream("A").num_finished == 4  # once, and at every heartbeat but the first
    house.done("A")
    house.beat("A")
    assert house.stream("A").num_finished == 4


def test_what_is_unknown_is_refused(house):
    house.beat("A")
    refusal = house.replies(Refused)[0]
    assert (refusal.request_id, refusal.code) == ("A", ErrorCode.UNKNOWN_REQUEST)
    assert "unknown request" in refusal.message


def test_a_heartbeat_says_nothing_of_streams_of_others(house):
    house.submit("A", max_tokens=5, ignore_eos=True, gateway="g")
    house.beat("A", gateway="h")
    assert house.stream("A", "h").refused is not None
    assert house.stream("A", "g").refused is None
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_absurd_positions_do_no_harm(house):
    house.submit("A", max_tokens=5, ignore_eos=True)
    house.step(2)
    for positions in ((), (99,), (-7,), (1, 2, 3)):
        for _ in range(3):
            house.beat("A", positions=positions)
    house.run()
    assert house.tokens("A") == house.solo("A")


# ------------------------------------------------------------------ time to live


def test_a_log_nobody_asks_for_is_dropped_after_its_time_to_live(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=1, ignore_eos=True)
    house.run()
    house.tick(9.9)
    assert house.status("A") is Status.FINISHED
    house.tick(0.2)
    assert house.status("A") is None


def test_a_log_its_gateway_lists_is_kept(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=1, ignore_eos=True)
    house.run()
    for _ in range(5):
        house.tick(9.0)
        house.beat("A")
    assert house.status("A") is Status.FINISHED


def test_time_takes_nothing_from_a_request_that_lives(build):
    house = build(stream_ttl_s=10.0)
    house.submit("A", max_tokens=3, ignore_eos=True)
    house.tick(1_000)
    house.run()
    assert house.tokens("A") == house.solo("A")
    house.tick(9.0)  # the time to live begins at its end
    assert house.status("A") is Status.FINISHED


# ------------------------------------------------------------------ taking over


def test_attach_gives_everything_so_far_and_the_rest_follows(house):
    house.submit("A", max_tokens=6, ignore_eos=True, context=b"c", key_hash=b"k", gateway="g")
    house.step(3)
    house.attach("A", "h", key_hash=b"k")
    submit, so_far = house.submits["A"], house.solo("A")[:3]
    (attached,) = house.replies(Attached)
    again = replace(submit, resubmitted=True, age_s=attached.submit.age_s)
    assert attached == Attached(again, (AttachedSequence(so_far),))
    assert attached.submit.age_s == pytest.approx(0.004)
    assert house.replies(Accepted) == [Accepted("A", 6)]
    house.run()
    assert house.tokens("A", "h") == house.solo("A")
    assert house.tokens("A", "g") == so_far
    assert house.finish("A", "h") is FinishReason.LENGTH
    assert house.finish("A", "g") is None


def test_attach_to_an_answer_that_is_over_gives_its_end_too(house):
    house.submit("A", max_tokens=2, ignore_eos=True)
    house.run()
    house.attach("A", "h")
    assert house.stream("A", "h").attached.sequences[0].finish is FinishReason.LENGTH
    assert house.tokens("A", "h") == house.solo("A")
    assert house.finish("A", "h") is FinishReason.LENGTH
    house.done("A", gateway="h")
    assert house.status("A") is None


def test_a_wrong_key_learns_no_more_than_a_wrong_id(house):
    house.submit("A", max_tokens=9, ignore_eos=True, key_hash=b"k")
    house.attach("A", "h", key_hash=b"x")
    house.attach("B", "h", key_hash=b"x")
    house.submit("C", max_tokens=9, key_hash=b"x", context=b"")
    house.attach("C", "h", key_hash=b"x")
    wrong_key, wrong_id, no_stream = [house.stream(name, "h").refused for name in "ABC"]
    assert (wrong_key.code, wrong_key.message) == (wrong_id.code, wrong_id.message)
    assert (no_stream.code, no_stream.message) == (wrong_id.code, wrong_id.message)
    assert wrong_id.code is ErrorCode.UNKNOWN_STREAM
    assert "300 s (--stream-ttl)" in wrong_id.message
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_who_was_replaced_no_longer_decides(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    house.attach("A", "h")
    house.cancel("A", gateway="g")
    house.lose_gateway("g")
    house.run()
    assert house.tokens("A", "h") == house.solo("A")


# ------------------------------------------------------------------ coming again


def test_a_stream_goes_on_from_what_was_generated_before_a_restart(build):
    first = build()
    first.submit("A", prompt=5, max_tokens=9, ignore_eos=True)
    first.step(4)
    second = build()
    second.submit("A", prompt=5, max_tokens=9, ignore_eos=True, generated=first.tokens("A"))
    assert second.rows() == {"A": (0, 9, 1)}  # recomputed as one prompt
    second.run()
    assert second.tokens("A") == first.solo("A")
    finished = second.stream("A").finished
    assert (finished.length, finished.usage.completion_tokens) == (9, 9)
    assert second.core.counters.tokens() == (5, 5)


def test_what_was_over_before_a_restart_is_over(house):
    house.submit("A", max_tokens=9, generated=(3, 4), finish=FinishReason.STOP)
    assert (house.finish("A"), house.tokens("A")) == (FinishReason.STOP, (3, 4))
    assert house.plans == []


def test_an_end_that_was_lost_with_the_scheduler_is_found_again(house):
    house.submit("A", max_tokens=9, generated=(3, 0))  # eos came, Finished did not
    house.submit("B", max_tokens=2, generated=(3, 4), ignore_eos=True)
    assert house.stream("A").finished.stop_token_id == 0
    assert house.finish("B") is FinishReason.LENGTH
    assert house.plans == []


def test_a_finish_told_by_the_gateway_keeps_the_stop_token_that_explains_it(house):
    house.submit("A", max_tokens=9, generated=(3, 0), finish=FinishReason.STOP)
    assert house.stream("A").finished.stop_token_id == 0
    house.submit("B", max_tokens=2, generated=(3, 4), finish=FinishReason.STOP, ignore_eos=True)
    assert house.finish("B") is FinishReason.STOP  # a stop string at the very limit


def test_a_request_that_is_here_already_is_not_doubled_but_caught_up(house):
    house.submit("A", max_tokens=6, ignore_eos=True, gateway="g")
    house.step(3)
    held = house.tokens("A")
    house.submit("A", max_tokens=6, ignore_eos=True, gateway="h", generated=held[:1])
    assert [type(c.message) for c in house.commands] == [Accepted, Tokens]
    assert house.replies(Tokens)[0].items[0].start == 1
    assert len(house.core.book) == 1
    house.run()
    assert house.tokens("A", "h") == house.solo("A")
    assert house.finish("A", "h") is FinishReason.LENGTH


def test_a_finished_request_that_comes_again_gets_all_it_misses(house):
    house.submit("A", max_tokens=3, ignore_eos=True)
    house.run()
    house.submit("A", max_tokens=3, ignore_eos=True, gateway="h")
    assert house.tokens("A", "h") == house.solo("A")
    assert len(house.replies(Finished)) == 1


def test_another_request_with_the_same_id_is_refused_and_harms_nobody(house):
    house.submit("A", prompt=(1, 2, 3), max_tokens=5, ignore_eos=True, gateway="g")
    house.submit("A", prompt=(4, 5, 6), max_tokens=5, ignore_eos=True, gateway="h")
    assert house.stream("A", "h").refused.param == "request_id"
    house.submit("A", prompt=(1, 2, 3), key_hash=b"x", max_tokens=5, gateway="h")
    assert house.stream("A", "h").refused.param == "request_id"
    house.submit("A", prompt=(1, 2, 3), max_tokens=5, ignore_eos=True, gateway="g")
    house.run()
    assert house.tokens("A", "g") == house.solo("A")


def test_a_lost_acceptance_is_said_again_with_what_else_was_missed(house):
    deaf(house)
    house.submit("A", max_tokens=None, ignore_eos=True)
    house.step()
    deaf(house, is_deaf=False)
    assert house.stream("A").max_tokens is None
    house.beat("A")
    house.beat("A")
    assert house.stream("A").max_tokens == 60
    assert house.tokens("A") == house.solo("A", 1)


def test_a_new_gateway_is_not_judged_by_the_heartbeats_of_the_old_one(house):
    house.submit("A", max_tokens=9, ignore_eos=True, gateway="g")
    house.step(3)
    house.beat("A", gateway="g", positions=(2,))
    house.attach("A", "h")
    assert house.beat("A", gateway="h", positions=(2,)) == []
