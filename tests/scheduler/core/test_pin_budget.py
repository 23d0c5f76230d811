"""A prefix beside requests that left their `max_tokens` to the server, on a pool of 16 blocks."""

import pytest

from shared.errors import ErrorCode
from shared.messages import Accepted
from shared.sampling import NO_DRAW, FinishReason

PREFIX = tuple(range(1, 11))  # three blocks of four
BESIDE = 13 * 4 - 5 + 1  # tokens after a prompt of five in the blocks that it leaves


def submit(house, name, max_tokens=None, **params):
    house.submit(name, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def max_tokens(house, name):
    return house.core.book.get(name).max_tokens


def is_refused_for_now(house, name):
    refused = house.stream(name).refused
    return refused.code is ErrorCode.PREFIX_BUDGET and refused.retry_after_s is not None


@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_whoever_left_it_to_the_server_gets_what_fits_beside_the_prefix(house, num_steps):
    submit(house, "A")
    assert max_tokens(house, "A") == 60
    house.step(num_steps)
    house.pin("P", PREFIX)
    assert Accepted("A", BESIDE) in house.replies(Accepted)
    house.run()
    assert house.pins()["P"].is_ready
    assert (house.finish("A"), len(house.tokens("A"))) == (FinishReason.LENGTH, BESIDE)
    assert house.tokens("A") == house.solo("A", 60)[:BESIDE]


def test_it_may_hold_all_that_is_left(build):
    house = build(watermark=0.0, plans_in_flight=2)
    submit(house, "A")
    submit(house, "B", 20)
    while len(house.tokens("A")) < 28:
        house.step()
    house.pin("P", range(1, 29))  # seven blocks; with the nine that A may fill all of the pool
    assert max_tokens(house, "A") == 9 * 4 - 5 + 1
    house.run()
    assert house.pins()["P"].is_ready
    assert len(house.tokens("A")) == 32
    assert house.tokens("A") == house.solo("A", 60)[:32]
    assert house.tokens("B") == house.solo("B")


def test_every_prefix_is_taken_while_somebody_chats(house):
    for number in range(20):
        submit(house, f"A{number}")
        house.step(2)
        house.pin(f"P{number}", PREFIX)
        house.step(5)
        assert house.pins()[f"P{number}"].is_ready
        house.unpin(f"P{number}")
        house.cancel(f"A{number}")
    assert house.core.counters.pins_refused.total() == 0


def test_what_was_asked_for_stays_and_then_nobody_gets_less(house):
    submit(house, "A")
    submit(house, "B", 56)
    house.pin("P", PREFIX)
    assert is_refused_for_now(house, "P")
    assert [max_tokens(house, name) for name in "AB"] == [60, 56]


def test_who_has_as_many_tokens_already_goes_on_and_the_prefix_is_refused_for_now(house):
    submit(house, "A")
    while len(house.tokens("A")) < BESIDE - 1:  # and one is being drawn
        house.step()
    house.pin("P", PREFIX)
    assert is_refused_for_now(house, "P")
    house.run()
    assert len(house.tokens("A")) == 60
    house.pin("P", PREFIX)
    house.run()
    assert house.pins()["P"].is_ready


@pytest.mark.parametrize(
    "params", [{"min_tokens": BESIDE + 1}, {"n": 3, "use_beam_search": True, "draw": NO_DRAW}]
)
def test_who_cannot_live_with_less_keeps_what_it_was_told(house, params):
    submit(house, "A", **params)
    before = max_tokens(house, "A")
    house.pin("P", PREFIX)
    assert is_refused_for_now(house, "P")
    assert max_tokens(house, "A") == before


def test_several_answers_share_what_is_left(house):
    submit(house, "A", n=2)
    house.step(3)
    house.pin("P", PREFIX)
    assert max_tokens(house, "A") == (1 + (13 - 1) // 2) * 4 - 5 + 1
    house.run()
    assert house.pins()["P"].is_ready
    assert [len(answer) for answer in house.answers("A")] == [24, 24]
