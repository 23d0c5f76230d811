"""One call from its prompts to its last byte: submit, answer, end."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from aiohttp import web

from services.gateway import failures, gauges, sse
from services.gateway.answer_group import AnswerGroup, StreamRefused
from services.gateway.answer_stream import Piece
from services.gateway.answer_times import AnswerTimes
from services.gateway.answers import Answer
from services.gateway.call import Call, Prompt
from services.gateway.json_portions import Turn
from services.gateway.link import SchedulerLink
from services.gateway.long_body import json_response, send
from services.gateway.progress import Progress
from services.gateway.stream_events import StreamEvents
from services.gateway.tokenizer import Tokenizer
from services.gateway.whole_answer import WholeAnswer
from shared.ids import Ids, RequestId
from shared.logs import get_logger
from shared.messages import Submit
from shared.sampling import INT64, SamplingParams

_CACHED_WITHIN_S: Final = 1.0

_log = get_logger("generation")


class Generation:
    """Carries out one `Call` whose prompts are already tokens.

    `release` it, whatever happens: that tells the scheduler (Done or Cancel).
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        stream_interval: int = 1,
    ) -> None:
        self.call = call
        self.answer = answer
        self._tokenizer = tokenizer
        self._link = link
        self._stream_interval = stream_interval
        self._group = AnswerGroup()
        self._progress: Progress | None = None
        self._times = AnswerTimes()

    async def start(
        self, prompts: Sequence[Prompt], eos_token_ids: Ids, key_hash: bytes = b""
    ) -> None:
        """Submit, each prompt as a request. Raises: WireError if one has no wire form."""
        turn = Turn()
        self._progress = Progress(
            self.call, prompts, self._tokenizer, eos_token_ids, self._stream_interval
        )
        for number, prompt in enumerate(prompts):
            request_id = self.answer.request_id
            if number:
                request_id = RequestId(f"{request_id}-{number}")
            submit = Submit(
                request_id,
                prompt.token_ids,
                self._sampling(number),
                cache_salt=self.call.cache_salt,
                key_hash=key_hash,
            )
            self._group.submit(self._link, submit)
            await turn.give()

    def _sampling(self, number: int) -> SamplingParams:
        sampling = self.call.sampling
        if self.call.is_seeded or number == 0:
            return sampling
        return replace(sampling, seed=(sampling.seed + number) % INT64.stop)

    def release(self) -> None:
        """Tell the scheduler that nobody reads any more."""
        for stream in self._group.streams:
            self._link.release(stream)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each once."""
        return self._progress.num_prompt_tokens if self._progress is not None else 0

    @property
    def num_cached(self) -> int:
        """How many of these were found in the cache, as far as a scheduler has said so."""
        return sum([stream.num_cached or 0 for stream in self._group.streams])

    @property
    def num_tokens(self) -> int:
        """Tokens generated, each choice up to its stop string."""
        return self._progress.num_tokens if self._progress is not None else 0

    @property
    def finish_reasons(self) -> str:
        """For the log."""
        return self._progress.finish_reasons if self._progress is not None else ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any choice."""
        return self._times.ttft_s

    # ------------------------------------------------------------------ in one piece

    async def whole(self) -> web.Response:
        """The answer in one piece. Raises: Failure."""
        progress = self._begun
        try:
            while not progress.is_over:
                for number, piece in await self._group.next():
                    index = progress.index_of(number, piece)
                    self._times.observe(index, piece)
                    progress.feed(index, piece)
                    self._stop_if_cut(number, index, piece)
        except StreamRefused as error:
            raise self._failure_of(error) from None
        num_cached = await self._cached_at_end()
        prompt_logprobs = [stream.let_logprobs_go() for stream in self._group.streams]
        answer = WholeAnswer(
            self.call, self.answer, progress, self._tokenizer, prompt_logprobs, num_cached
        )
        response = await json_response(answer.portions())
        self._times.ended()
        return response

    # ------------------------------------------------------------------ as a stream

    async def stream(
        self, request: web.Request, response: web.StreamResponse, ping_interval_s: float
    ) -> None:
        """Headers as soon as all requests are taken, then events until [DONE].

        Raises: Failure while nothing was sent; later ones, and bugs of ours, are events.
        """
        try:
            await self._group.wait_accepted(ping_interval_s)
        except StreamRefused as error:
            raise self._failure_of(error) from None
        await response.prepare(request)
        failed = None
        try:
            closing = await self._tell(response, ping_interval_s)
        except StreamRefused as error:
            failed = self._failure_of(error)
        except failures.Failure as failure:
            failed = failure
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - a bug of ours: logged, and told as any failure
            _log.exception("stream_failed", request_id=self.answer.request_id)
            failed = failures.internal()
        if failed is not None:
            failed.message, failed.param = self.call.in_client_words(failed.message, failed.param)
            gauges.REQUESTS_REJECTED.labels(reason=failed.code).inc()
            closing = sse.event(failed.fields)
        await response.write(closing + sse.DONE)
        await response.write_eof()
        if failed is None:
            self._times.ended()

    async def _tell(self, response: web.StreamResponse, ping_interval_s: float) -> bytes:
        """Events until all choices have ended; returns what comes before [DONE]."""
        progress = self._begun
        events = StreamEvents(self.call, self.answer, progress, self._tokenizer)
        await send(response, await _in_turns(events.opening()))
        sent_at = time.monotonic()
        while not progress.is_over:
            wait_s = max(0.0, sent_at + ping_interval_s - time.monotonic())
            told, failure = await self._events_of(events, await self._group.next(wait_s))
            if not told and time.monotonic() - sent_at >= ping_interval_s:
                told = [sse.PING]  # nothing came, or tokens that are no text yet
            if told:
                await send(response, told)
                sent_at = time.monotonic()
            if failure is not None:
                raise failure
        if self.call.stream is None or not self.call.stream.include_usage:
            return b""
        return events.usage(await self._cached_at_end())

    async def _events_of(
        self, events: StreamEvents, pieces: Sequence[tuple[int, Piece]]
    ) -> tuple[list[bytes], failures.Failure | None]:
        """One write's worth, and the error that ends the stream after it, if one came."""
        told: list[bytes] = []
        turn = Turn()
        for number, piece in pieces:
            index = self._begun.index_of(number, piece)
            self._times.observe(index, piece)
            try:
                for portion in events.of(index, piece):
                    told.append(portion)
                    await turn.give()
            except failures.Failure as failure:
                return told, failure
            self._stop_if_cut(number, index, piece)
        return told, None

    # ------------------------------------------------------------------ both

    @property
    def _begun(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("start comes first")
        return self._progress

    async def _cached_at_end(self) -> int:
        """Tokens of all prompts that were found in the cache; for an answer that is over.

        The scheduler says so at a sequence's end. Where only stop strings ended them, its answer
        to their cancelling is a moment away; what a scheduler that died knew is counted as 0.
        """
        if not await self._group.wait_cached(_CACHED_WITHIN_S):
            _log.warning("cached_tokens_unknown", request_id=self.answer.request_id)
        return self.num_cached

    def _failure_of(self, error: StreamRefused) -> failures.Failure:
        """What the client is told: of several prompts, also which one is to blame."""
        failure = failures.of_refusal(error.refused)
        if failure.status == 429 and len(self._group.streams) > 1:
            failure.message += f", or send fewer than {len(self._group.streams)} prompts at once"
        if failure.status == 400 and len(self._group.streams) > 1:
            name = f"prompt[{error.number}]"
            failure.message = f"{name}: {failure.message}"
            if failure.param == "prompt":
                failure.param = name
        return failure

    def _stop_if_cut(self, number: int, index: int, piece: Piece) -> None:
        """A stop string is the gateway's to find; the scheduler knows nothing of it."""
        choice = self._begun.choices[index]
        if choice.needs_stop:
            choice.needs_stop = False
            self._link.stop(self._group.streams[number], piece.sequence)


async def _in_turns(portions: Iterable[bytes]) -> list[bytes]:
    """All of them, others having their turns while they are made."""
    turn = Turn()
    told = []
    for portion in portions:
        told.append(portion)
        await turn.give()
    return told
