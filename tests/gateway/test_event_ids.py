"""An event's id says all that its client has: from any of them an answer goes on without a seam."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.event_id import Place, Told, event_id, read_event_id
from shared.ids import RequestId
from tests.gateway import telling
from tests.gateway.scripted_scheduler import EOS
from tests.gateway.telling import Delivery, Telling, call_of, every_token, prompt_of, stumbling

CHARACTERS = st.text("ab\n世é😀", max_size=20)
STOPS = st.lists(st.text("ab\n世é", min_size=1, max_size=4), max_size=2)
PLACES = st.builds(Place, st.integers(0, 10**9 - 1), st.just(True)) | st.sampled_from(
    (Place(), Place(7, is_open=True, has_text=True), Place(0, True, True, True))
)


def after(told: telling.Told, count: int) -> Told:
    """What a client has that got so many events."""
    if count == 0:
        return Told()
    read = read_event_id(told.frames[count - 1][0])
    assert read is not None
    return read[1]


def seen(told: telling.Told, n: int) -> list[Any]:
    """All that a client makes of an answer; where it is cut into events is left out."""
    return [
        [
            told.text(index),
            told.token_ids(index),
            told.logprobs(index),
            [c["finish_reason"] for c in told.choices(index) if c["finish_reason"]],
            [c["stop_reason"] for c in told.choices(index) if "stop_reason" in c],
            ["role" in c.get("delta", ()) for c in told.choices(index)].count(True),
            [c["prompt_token_ids"] for c in told.choices(index) if "prompt_token_ids" in c],
        ]
        for index in range(n)
    ] + [[chunk["usage"] for _, chunk in told.frames if not chunk["choices"]]]


def check_every_cut(
    answers: list[list[int]], dice: random.Random, stop_id: int | None = None, **fields: Any
) -> int:
    """Cut behind each event, and go on with tokens that come in other portions. How many cuts."""

    def told_by(before: Told | None, deliver: Any) -> telling.Told:
        gateway = Telling(call_of(n=len(answers), **fields), told=before, stream_interval=interval)
        return gateway.as_stream([deliver(answer) for answer in answers])

    def stumble(answer: list[int]) -> Delivery:
        delivery = stumbling(answer, dice)
        delivery.stop_token_id = stop_id
        return delivery

    interval = dice.choice((1, 1, 3))
    whole = told_by(None, stumble)
    for count in range(len(whole.frames) + 1):
        rest = told_by(
            after(whole, count), dice.choice((stumble, lambda x: Delivery(x, (), stop_id)))
        )
        joined = telling.Told(whole.frames[:count] + rest.frames)
        n = len(answers)
        assert seen(joined, n) == seen(whole, n), f"cut behind {whole.frames[count - 1][0]}"
        if rest.frames:
            assert rest.frames[-1] == whole.frames[-1]
    return len(whole.frames)


@given(
    texts=st.lists(CHARACTERS, min_size=1, max_size=2),
    stops=STOPS,
    logprobs=st.sampled_from((None, 0, 2)),
    endpoint=st.sampled_from(("completion", "chat")),
    includes=st.booleans(),
    cut=st.integers(0, 3),
    dice=st.randoms(use_true_random=False),
)
def test_an_answer_goes_on_behind_any_event(
    texts, stops, logprobs, endpoint, includes, cut, dice
) -> None:
    answers = [list(text.encode()) for text in texts]
    answers = [answer[: max(0, len(answer) - cut)] for answer in answers]  # half a character
    check_every_cut(
        answers, dice, endpoint=endpoint, logprobs=logprobs, stop=stops,
        include_stop_str_in_output=includes,
    )  # fmt: skip


@given(text=CHARACTERS, logprobs=st.sampled_from((None, 2)), dice=st.randoms())
def test_so_does_one_that_repeats_its_prompt(text, logprobs, dice) -> None:
    check_every_cut([list(text.encode()), [98, 97]], dice, logprobs=logprobs, echo=True)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_and_one_that_holds_back_and_lets_out_at_its_end(logprobs) -> None:
    dice = random.Random(5)
    for _ in range(20):
        answer = [*b"some sto", *b"sto", *b"x st", EOS]
        assert check_every_cut([answer], dice, EOS, stop=["stop"], logprobs=logprobs) >= 3


def test_an_id_says_what_is_behind_it() -> None:
    whole = Telling(call_of(stop=["end"])).as_stream([every_token(list(b"it's ends"))])
    ids = [frame_id.removeprefix("cmpl-1:") for frame_id, _ in whole.frames]
    assert ids == ["1", "2", "3", "4", "5", "8e", "done"]
    whole = Telling(call_of(stop=["end"])).as_stream([every_token(list(b"men"))])
    ids = [frame_id.removeprefix("cmpl-1:") for frame_id, _ in whole.frames]
    assert ids == ["1", "3t", "3e", "done"]


@given(st.lists(PLACES, min_size=1, max_size=128))
def test_an_id_is_read_as_it_was_written(places) -> None:
    written = event_id(RequestId("cmpl-1"), list(map(str, places)))
    assert written is not None
    assert read_event_id(written) == (RequestId("cmpl-1"), Told(tuple(places)))


def test_an_answer_of_very_many_choices_has_none() -> None:
    assert event_id(RequestId("cmpl-1"), ["0"] * 129) is None
    assert read_event_id("cmpl-1:" + ".".join(["0"] * 129)) is None


@pytest.mark.parametrize(
    "text",
    ["", "cmpl-1", "cmpl-1:", "cmpl-1:1..2", "cmpl-1:1x", "cmpl-1:te", "cmpl-1:-1", "other-1:3",
     "cmpl-:3", "cmpl-1:1234567890", "cmpl-1:3:4", "cmpl-é:1", "cmpl-1:٣", "1", "cmpl-1:3\n"],
)  # fmt: skip
def test_anything_else_is_none(text) -> None:
    assert read_event_id(text) is None


def test_an_id_of_another_answer_tells_nothing_of_this_one() -> None:
    told = Told((Place(3, is_open=True),) * 2)
    hi = Telling(call_of(), [prompt_of("Hi")], told=told).as_stream([Delivery(list(b"abc"))])
    assert hi.text() == "abc"
