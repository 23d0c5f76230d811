"""One answer without a socket: the scheduler's messages in, events and JSON out."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway import event_id as before
from services.gateway.answer_stream import AnswerStream
from services.gateway.answers import Answer
from services.gateway.call import Call, Prompt, StreamOptions
from services.gateway.progress import Progress
from services.gateway.stream_events import StreamEvents
from services.gateway.tokenizer import Tokenizer, ToyTokenizer
from services.gateway.whole_answer import WholeAnswer
from shared.ids import RequestId
from shared.messages import Finished, Submit, TokenRun, Usage
from shared.sampling import FinishReason, SamplingParams
from tests.gateway.scripted_scheduler import EOS, places_of

ALL_USAGE = StreamOptions(include_usage=True, continuous_usage=True)


def prompt_of(text: str) -> Prompt:
    """As the toy reads it."""
    return Prompt(tuple(text.encode()), text)


HI = prompt_of("Hi")


def call_of(
    endpoint: str = "completion",
    logprobs: int | None = None,
    stop: Sequence[str] = (),
    n: int = 1,
    **fields: Any,
) -> Call:
    """A call with everything that an event can tell, unless told otherwise."""
    scores = fields.get("echo") or fields.get("returns_prompt_logprobs")
    of_prompt = logprobs if scores else None
    sampling = SamplingParams(n=n, logprobs=logprobs, prompt_logprobs=of_prompt)
    told = {"stream": ALL_USAGE, "return_token_ids": True, **fields}
    return Call(endpoint=endpoint, model=None, sampling=sampling, stop=tuple(stop), **told)


@dataclass
class Delivery:
    """How the tokens of one choice reach the gateway.

    `runs` are (first, length): overlaps are repeats, gaps are refused; then comes all the rest.
    """

    token_ids: Sequence[int]
    runs: Sequence[tuple[int, int]] = ()
    stop_token_id: int | None = None


def every_token(token_ids: Sequence[int]) -> Delivery:
    return Delivery(token_ids, [(index, 1) for index in range(len(token_ids))])


def stumbling(token_ids: Sequence[int], dice: random.Random) -> Delivery:
    """Runs of any length; some are lost and mended, some come again."""
    runs, at = [], 0
    while at < len(token_ids):
        length = dice.randrange(1, 9)
        runs.append((max(0, at + dice.choice((0, 0, -2, 3))), length))
        at += length
    return Delivery(token_ids, runs)


@dataclass
class Told:
    """A stream as its client has it in the end."""

    frames: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(SSE id, object)."""

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for _, chunk in self.frames for c in chunk["choices"] if c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            c["delta"].get("content", "") if "delta" in c else c["text"]
            for c in self.choices(index)
        )

    def token_ids(self, index: int = 0) -> list[int]:
        return [i for c in self.choices(index) for i in c.get("token_ids", ())]

    def logprobs(self, index: int = 0) -> dict[str, list[Any]]:
        """All `logprobs` of a choice, joined field by field."""
        joined: dict[str, list[Any]] = {}
        for choice in self.choices(index):
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values or [])
        return joined


def parse(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    frames = []
    for frame in data.decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in frame.split("\n") if line[:1] not in ("", ":")
        )
        if fields:
            frames.append((fields["id"], json.loads(fields["data"])))
    return frames


class Telling:
    """The gateway's half of one answer, fed by hand."""

    def __init__(
        self,
        call: Call,
        prompts: Sequence[Prompt] = (HI,),
        *,
        tokenizer: Tokenizer | None = None,
        stream_interval: int = 1,
        told: before.Told | None = None,
    ) -> None:
        """`told`: what the client has already."""
        tokenizer = tokenizer or ToyTokenizer()
        self.call = call
        self.answer = Answer(call.endpoint, RequestId("cmpl-1"), "toy", 0)
        self.progress = Progress(call, prompts, tokenizer, (EOS,), stream_interval)
        self.tokenizer = tokenizer
        self.streams = [
            AnswerStream(Submit(RequestId(f"cmpl-1-{p}"), prompt.token_ids, call.sampling), _no_one)
            for p, prompt in enumerate(prompts)
        ]
        self._events = StreamEvents(call, self.answer, self.progress, tokenizer, told)

    def as_stream(self, deliveries: Sequence[Delivery]) -> Told:
        """One message of each choice in turn, and all that is new told after each."""
        told = Told(parse(b"".join(self._events.opening())))
        turns = max(len(delivery.runs) for delivery in deliveries)
        for turn in range(turns + 1):
            for index, delivery in enumerate(deliveries):
                self._deliver(index, delivery, turn, is_last=turn == turns)
                told.frames += parse(b"".join(self._news(index // self.call.sampling.n)))
        told.frames += parse(self._events.usage(0))
        return told

    def in_one_piece(self, deliveries: Sequence[Delivery]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads("".join(self.whole(deliveries).portions()))
        return answer

    def portions(self, deliveries: Sequence[Delivery]) -> list[bytes]:
        """What a stream writes if all comes at once."""
        told = list(self._events.opening())
        for index, delivery in enumerate(deliveries):
            self._deliver(index, delivery, 0, is_last=True)
            told += self._news(index // self.call.sampling.n)
        return told

    def whole(self, deliveries: Sequence[Delivery]) -> WholeAnswer:
        for index, delivery in enumerate(deliveries):
            self._deliver(index, delivery, 0, is_last=True)
            number = index // self.call.sampling.n
            for piece in self.streams[number].take():
                self.progress.feed(self.progress.index_of(number, piece), piece)
        of_prompts = [stream.let_logprobs_go() for stream in self.streams]
        return WholeAnswer(self.call, self.answer, self.progress, self.tokenizer, of_prompts, 0)

    def _news(self, number: int) -> list[bytes]:
        told: list[bytes] = []
        for piece in self.streams[number].take():
            index = self.progress.index_of(number, piece)
            told += self._events.of(index, piece)
            if self.progress.choices[index].needs_stop:
                self.streams[number].stopped(piece.sequence)
        return told

    def _deliver(self, index: int, delivery: Delivery, turn: int, *, is_last: bool) -> None:
        number, sequence = divmod(index, self.call.sampling.n)
        stream = self.streams[number]
        if turn < len(delivery.runs):
            start, length = delivery.runs[turn]
            have = stream.position.positions[sequence]
            run = run_of(stream.submit, delivery.token_ids, start, start + length, sequence)
            assert stream.arrived(run) == (start <= have)
        if is_last:
            stream.arrived(run_of(stream.submit, delivery.token_ids, 0, None, sequence))
            length = len(delivery.token_ids)
            usage = Usage(len(stream.submit.prompt), length)
            reason = FinishReason.LENGTH if delivery.stop_token_id is None else FinishReason.STOP
            stream.ended(
                Finished(stream.request_id, sequence, reason, length, usage, delivery.stop_token_id)
            )


def run_of(
    submit: Submit,
    token_ids: Sequence[int],
    start: int,
    end: int | None = None,
    sequence: int = 0,
) -> TokenRun:
    """Tokens with what the request asks for beside them."""
    sampling, new = submit.sampling, tuple(token_ids[start:end])
    first = len(submit.prompt) + start
    logprobs, of_prompt = [], []
    if (num_top := sampling.logprobs) is not None:
        logprobs = [places_of(x, first + i, num_top) for i, x in enumerate(new)]
    if (num_top := sampling.prompt_logprobs) is not None and start == 0 and sequence == 0:
        of_prompt = [places_of(x, i, num_top) for i, x in enumerate(submit.prompt) if i]
    return TokenRun(submit.request_id, sequence, start, new, tuple(logprobs), tuple(of_prompt))


def _no_one() -> None:
    """Nobody sleeps until there is news: these tests ask."""
