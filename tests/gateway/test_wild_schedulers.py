"""A scheduler that says anything: no exception, no client that waits for ever."""

import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import failures
from services.gateway.answers import Answer
from services.gateway.call import Call
from services.gateway.generation import Generation
from services.gateway.link import SchedulerLink
from services.gateway.tokenizer import ToyTokenizer
from shared.errors import ErrorCode
from shared.ids import RequestId
from shared.messages import (
    TO_GATEWAY,
    Accepted,
    Finished,
    Heartbeat,
    KVBill,
    PositionLogprobs,
    Refused,
    TokenRun,
    Tokens,
    Usage,
    Welcome,
)
from shared.sampling import NO_DRAW, FinishReason
from tests.fuzzing import many_cases
from tests.gateway.scripted_scheduler import EOS, TOY_SHAPE
from tests.gateway.telling import call_of, prompt_of
from tests.scheduler.core.wild import gone_wild, on_the_wire, wild


def beams_of(call: Call) -> Call:
    sampling = replace(call.sampling, draw=NO_DRAW, use_beam_search=True)
    return replace(call, sampling=sampling, priority=-1, deadline_s=60.0)


CALLS = {
    "a": call_of(logprobs=1, echo=True, n=2, stop=["xy"]),
    "b": call_of("chat", logprobs=0),
    "c": call_of(stream=None, stop=["x"], returns_prompt_logprobs=True, logprobs=2),
    "d": call_of("chat", stream=None, n=2),
    "e": beams_of(call_of(logprobs=1, n=2)),
    "f": beams_of(call_of("chat", stream=None, n=3)),
}
PROMPT = prompt_of("Hi")
NAMES = st.sampled_from(tuple(CALLS))
SMALL = st.integers(0, 2)
TOKENS = st.sampled_from((*b"xxyyab\xe4\xb8", EOS))
PLACES = st.builds(
    PositionLogprobs,
    st.sampled_from((-1.0, float("-inf"), float("nan"))),
    SMALL,
    st.sampled_from(((), (1, 2))),
    st.sampled_from(((), (-1.0, -2.0), (0.0,))),
)


@st.composite
def runs(draw):
    """Such as a request asks for: as many log-probabilities as tokens, one of its prompt."""
    tokens = tuple(draw(st.lists(TOKENS, max_size=4)))
    places = tuple([draw(PLACES) for _ in tokens])
    of_prompt = (draw(PLACES),)
    return TokenRun(draw(NAMES), draw(SMALL), draw(SMALL), tokens, places, of_prompt)


MESSAGES = (
    st.builds(Tokens, st.lists(runs() | gone_wild(runs()), max_size=4).map(tuple))
    | gone_wild(
        st.builds(
            Finished,
            NAMES,
            SMALL,
            st.sampled_from(FinishReason),
            st.integers(0, 6),
            st.builds(Usage, SMALL, SMALL, SMALL, st.none() | wild(KVBill)),
        )
    )
    | st.builds(Accepted, NAMES, st.integers(-1, 99))
    | gone_wild(
        st.builds(Refused, NAMES, st.sampled_from(ErrorCode), st.just("no"), st.none(), st.floats())
    )
    | st.builds(Heartbeat, st.sampled_from((1, 2)), st.sampled_from(("", "asleep")))
    | st.builds(
        Welcome,
        st.sampled_from((1, 2)),
        st.sampled_from(("toy", "another")),
        st.just(TOY_SHAPE),
        st.just(16),
        st.just(64),
        st.just((EOS,)),
    )
    | st.one_of(*map(wild, TO_GATEWAY))
)


class Heard:
    """Where a stream writes; it begins with `prepare`."""

    def __init__(self) -> None:
        self.written = b""

    async def prepare(self, _request: Any) -> None:
        """Headers."""

    async def write(self, data: bytes) -> None:
        self.written += data

    async def write_eof(self) -> None:
        """The end."""


async def told_by(generation: Generation) -> bytes:
    """The body that its client has in the end."""
    heard = Heard()
    try:
        if generation.call.stream is None:
            response = await generation.whole()
            await response.body.write(heard)
        else:
            await generation.stream(None, heard, 0.01)
            assert heard.written.endswith(b"data: [DONE]\n\n")
    except failures.Failure as failure:
        await heard.write(failure.response().body)
    return heard.written


def make_generation(call: Call, answer: Answer, link: SchedulerLink) -> Generation:
    return Generation(call, answer, ToyTokenizer(), link, arrived_at=time.monotonic())


async def all_told(messages: list[Any]) -> list[bytes]:
    """What each of six clients has been told after these messages and a shutdown."""
    with tempfile.TemporaryDirectory() as folder:
        link = SchedulerLink(f"ipc://{Path(folder)}/r", "toy", 512)
        try:
            generations = []
            for name, call in CALLS.items():
                answer = Answer(call.endpoint, RequestId(name), "toy")
                generations.append(make_generation(call, answer, link))
                await generations[-1].start([PROMPT], (EOS,))
            telling = [asyncio.create_task(told_by(one)) for one in generations]
            for message in messages:
                link._handle(on_the_wire(message))
                await asyncio.sleep(0)
            link._say_what_is_due()
            link.fail_all("the server is shutting down")
            async with asyncio.timeout(30):
                told = await asyncio.gather(*telling)
            for generation in generations:
                generation.release()
            assert link.num_open == 0
            return told
        finally:
            link.close()


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.fuzz
@many_cases
@given(st.lists(MESSAGES, max_size=25))
def test_whatever_a_scheduler_says_every_client_gets_an_end(messages) -> None:
    for told in asyncio.run(all_told(messages)):
        assert b"its log says why" not in told, "a bug of ours"
        for line in told.decode().split("\n"):
            text = line.removeprefix("data: ")
            if text[:1] == "{":
                json.loads(text, parse_constant=refuse)


def test_what_is_plausible_is_told_to_its_end() -> None:
    """So the six clients are there, and what is sent reaches them."""
    places = PositionLogprobs(-1.0, 1, (1, 2), (-1.0, -2.0))
    messages: list[Any] = []
    for name, call in CALLS.items():
        for sequence in range(call.sampling.n):
            run = TokenRun(RequestId(name), sequence, 0, tuple(b"ok"), (places,) * 2, (places,))
            messages.append(Tokens((run,)))
            end = Finished(RequestId(name), sequence, FinishReason.LENGTH, 2, Usage(2, 2))
            messages.append(end)
    for told, call in zip(asyncio.run(all_told(messages)), CALLS.values(), strict=True):
        assert told.count(b'"length"') == call.sampling.n
        assert b"shutting down" not in told
