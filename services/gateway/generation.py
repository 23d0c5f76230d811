"""One call from its prompts to its last byte: submit, answer, end."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from aiohttp import web

from services.gateway import failures, gauges, sse
from services.gateway.answer_group import AnswerGroup, Deadline, StreamRefused
from services.gateway.answer_stream import AnswerStream, Piece
from services.gateway.answer_times import AnswerTimes
from services.gateway.answers import Answer
from services.gateway.call import Call, Prompt
from services.gateway.connection_clock import ConnectionClock
from services.gateway.event_id import Told
from services.gateway.json_portions import Turn
from services.gateway.link import SchedulerLink
from services.gateway.long_body import StreamWriter, json_response
from services.gateway.news import woken_alone
from services.gateway.progress import Progress
from services.gateway.stream_context import packed, request_id_of
from services.gateway.stream_events import StreamEvents
from services.gateway.tokenizer import Tokenizer
from services.gateway.whole_answer import WholeAnswer
from shared.errors import ErrorCode
from shared.ids import Ids
from shared.logs import get_logger
from shared.messages import KVBill, Submit
from shared.sampling import INT64, SamplingParams

_SETTLED_WITHIN_S: Final = 1.0

_log = get_logger("generation")


class Generation:
    """Carries out one `Call` whose prompts are already tokens: `start` it, or `take_over`.

    `arrived_at` is when its request had come whole (monotonic seconds); `clock` stands on its
    client's connection. `release` it, whatever happens: that tells the scheduler (Done, Cancel or
    Detach).
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        stream_interval: int = 1,
        *,
        arrived_at: float,
        clock: ConnectionClock | None = None,
    ) -> None:
        self.call = call
        self.answer = answer
        self._tokenizer = tokenizer
        self._link = link
        self._stream_interval = stream_interval
        self._arrived_at = arrived_at
        deadline = Deadline(arrived_at, call.deadline_s) if call.deadline_s is not None else None
        self._group = AnswerGroup(link, deadline)
        self._progress: Progress | None = None
        self._times = AnswerTimes(arrived_at)
        self._told: Told | None = None
        self._clock = clock
        self._is_told = False
        self.error_code: str | None = None
        """Of the error that ended a stream, told as an event."""

    async def start(
        self, prompts: Sequence[Prompt], eos_token_ids: Ids, key_hash: bytes = b""
    ) -> None:
        """Submit, each prompt as a request.

        Raises: Failure if it is too late already; WireError if one has no wire form.
        """
        turn = Turn()
        self._check_deadline()
        self._progress = Progress(
            self.call, prompts, self._tokenizer, eos_token_ids, self._stream_interval
        )
        for number, prompt in enumerate(prompts):
            submit = Submit(
                request_id_of(self.answer.request_id, number),
                prompt.token_ids,
                self._sampling(number),
                priority=self.call.priority,
                cache_salt=self.call.cache_salt,
                deadline_s=self.call.deadline_s,
                age_s=time.monotonic() - self._arrived_at,
                context=packed(self.call, self.answer, len(prompts), prompt),
                key_hash=key_hash,
            )
            self._group.submit(submit)
            await turn.give()

    def begin_again(self, told: Told) -> None:
        """It was begun before, and lost: `start` it, and tell what comes after this."""
        self._told = told
        self._times.begin_anywhere()

    def take_over(
        self,
        streams: Sequence[AnswerStream],
        prompts: Sequence[Prompt],
        eos_token_ids: Ids,
        told: Told,
    ) -> None:
        """Go on with requests that others had, one a prompt, after what the client was told."""
        self.begin_again(told)
        self._progress = Progress(
            self.call, prompts, self._tokenizer, eos_token_ids, self._stream_interval
        )
        for stream in streams:
            self._group.adopt(stream)

    def _check_deadline(self) -> None:
        """Raises: Failure if making tokens of the prompts has taken until the deadline."""
        deadline_s, age_s = self.call.deadline_s, time.monotonic() - self._arrived_at
        if deadline_s is not None and age_s >= deadline_s:
            raise failures.deadline_passed(deadline_s, "before the prompt was read")

    def _sampling(self, number: int) -> SamplingParams:
        sampling = self.call.sampling
        if self.call.is_seeded or number == 0:
            return sampling
        return replace(sampling, seed=(sampling.seed + number) % INT64.stop)

    def release(self) -> None:
        """Tell the scheduler that nobody reads any more, and whether somebody may come again."""
        keeps = self._keeps
        self._group.close()
        for stream in self._group.streams:
            self._link.release(stream, keeps=keeps, is_told=self._is_told)
        if keeps and not self._is_told and not self._group.has_moved:
            reason = "slow_reader" if self._has_stalled else "client_gone"
            if self._link.is_leaving:
                reason = "draining"
            gauges.STREAMS_DETACHED.labels(reason=reason).inc()

    @property
    def _keeps(self) -> bool:
        """Whether the requests are kept for a client that may come back."""
        options = self.call.stream
        if options is not None and self._group.has_moved:
            return True  # it has come back, and asks for one request after the other
        if options is None or self.error_code not in (None, ErrorCode.DRAINING):
            return False
        if self._is_told:
            return options.resumable
        return options.resumable or self._link.is_leaving or self._has_stalled

    @property
    def _has_stalled(self) -> bool:
        return self._clock is not None and self._clock.has_stalled

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
        """For the log: "open" for what nobody waited for, "error" for what `error_code` ended."""
        of_open = "open" if self.error_code is None else "error"
        return self._progress.finish_reasons(of_open) if self._progress is not None else ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any choice."""
        return self._times.ttft_s

    # ------------------------------------------------------------------ in one piece

    async def whole(self) -> web.Response:
        """The answer in one piece. Raises: Failure."""
        progress = self._begun
        turn = Turn()
        try:
            while not progress.is_over:
                for number, piece in await self._group.next():
                    index = progress.index_of(number, piece)
                    self._times.observe(index, piece)
                    progress.feed(index, piece)
                    self._stop_if_cut(number, index, piece)
                    await turn.give()
        except StreamRefused as error:
            raise self._failure_of(error) from None
        await self._settle()
        prompt_logprobs = [stream.let_logprobs_go() for stream in self._group.streams]
        answer = WholeAnswer(
            self.call,
            self.answer,
            progress,
            self._tokenizer,
            prompt_logprobs,
            self.num_cached,
            self._bills,
        )
        response = await json_response(answer.portions())
        self._times.ended()
        return response

    # ------------------------------------------------------------------ as a stream

    async def stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        ping_interval_s: float,
        preface: bytes = b"",
    ) -> None:
        """Headers as soon as all requests are taken, `preface`, then events until [DONE].

        Raises: Failure while nothing was sent; later ones, and bugs of ours, are events.
        """
        try:
            await self._group.wait_accepted(ping_interval_s)
        except StreamRefused as error:
            raise self._failure_of(error) from None
        await response.prepare(request)
        writer = StreamWriter(response)
        await writer.tell([preface] if preface else ())
        failed = None
        try:
            closing = await woken_alone(self._tell(writer, ping_interval_s))
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
            self.error_code = failed.code
            closing = sse.event(failed.fields)
        await writer.flush()
        await response.write(closing + sse.DONE)
        await response.write_eof()
        if failed is None:
            self._is_told = True
            self._times.ended()

    async def _tell(self, writer: StreamWriter, ping_interval_s: float) -> bytes:
        """Events until all choices have ended; returns what comes before [DONE].

        Raises: StreamRefused or Failure, after all that came before it is told (`writer`).
        """
        progress = self._begun
        events = StreamEvents(self.call, self.answer, progress, self._tokenizer, self._told)
        await writer.tell(events.opening())
        await writer.flush()
        sent_at = time.monotonic()
        try:
            while not progress.is_over:
                pieces = await self._group.next(sent_at + ping_interval_s)
                writer.begin()
                is_told = await self._tell_pieces(writer, events, pieces)
                if not is_told and time.monotonic() - sent_at >= ping_interval_s:
                    await writer.tell([sse.PING])  # nothing came, or no text yet
                    is_told = True
                if is_told:
                    await writer.flush()
                    sent_at = time.monotonic()
        except (StreamRefused, failures.Failure) as error:
            with suppress(failures.Failure):  # the first one is told
                await self._tell_pieces(writer, events, self._group.rest())
            if not _goes_on(error):  # else what is held back is told where it does
                await writer.tell(events.broken_off())
            raise
        if self.call.stream is None or not self.call.stream.include_usage:
            return b""
        await self._settle()
        return events.usage(self.num_cached, self._bills)

    async def _tell_pieces(
        self, writer: StreamWriter, events: StreamEvents, pieces: Sequence[tuple[int, Piece]]
    ) -> bool:
        """Whether there was anything to tell. Raises: Failure, the first one, after the rest."""
        is_told, failed = False, None
        for number, piece in pieces:
            index = self._begun.index_of(number, piece)
            self._times.observe(index, piece)
            try:
                for portion in events.of(index, piece):
                    is_told = True
                    if writer.add(portion):
                        await writer.pause()
            except failures.Failure as failure:
                failed = failed or failure
            self._stop_if_cut(number, index, piece)
        if failed is not None:
            raise failed
        return is_told

    # ------------------------------------------------------------------ both

    @property
    def _begun(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("start comes first")
        return self._progress

    @property
    def _bills(self) -> list[KVBill]:
        """What each prompt's request cost in blocks; none where no bills are kept."""
        return [stream.bill for stream in self._group.streams if stream.bill is not None]

    async def _settle(self) -> None:
        """Let the scheduler say what was cached, and its bills; for an answer that is over.

        It says so at a sequence's end. Where only stop strings ended them, its answer to their
        cancelling is a moment away; what a scheduler that died knew is counted as 0.
        """
        if not await self._group.wait_settled(_SETTLED_WITHIN_S):
            _log.warning("usage_unknown", request_id=self.answer.request_id)

    def _failure_of(self, error: StreamRefused) -> failures.Failure:
        """What the client is told: of several prompts, also which one is to blame."""
        if error.refused.code is ErrorCode.DRAINING:
            return failures.draining(self.answer.request_id if self.call.stream else None)
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


def _goes_on(error: Exception) -> bool:
    """Whether the answer goes on somewhere else."""
    codes = (ErrorCode.DRAINING, ErrorCode.MOVED)
    return isinstance(error, StreamRefused) and error.refused.code in codes
