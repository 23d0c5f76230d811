"""One request from its prompt to its last byte: submit, text, events, end."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from services.gateway import failures, gauges, sse
from services.gateway.answer_stream import AnswerStream, Piece, StreamRefused
from services.gateway.answers import Answer, Ending, usage_fields
from services.gateway.call import Call, Prompt
from services.gateway.choice_text import ChoiceText, TextRules
from services.gateway.link import SchedulerLink
from services.gateway.stop_strings import StopStrings
from services.gateway.tokenizer import Tokenizer
from shared.logs import get_logger
from shared.messages import Finished, Submit
from shared.sampling import FinishReason

_log = get_logger("generation")
_readable_json = partial(json.dumps, ensure_ascii=False)


@dataclass(slots=True)
class Choice:
    """One choice of an answer and how far it is."""

    text: ChoiceText
    ending: Ending | None = None


class Generation:
    """Carries out one `Call` whose prompt is already tokens.

    A context manager: leaving it, in whatever way, tells the scheduler (Done or Cancel).
    """

    def __init__(
        self, call: Call, answer: Answer, tokenizer: Tokenizer, link: SchedulerLink
    ) -> None:
        self.call = call
        self.answer = answer
        self._tokenizer = tokenizer
        self._link = link
        self._choices: list[Choice] = []
        self._stream: AnswerStream | None = None
        self._prompt: Prompt | None = None
        self._began = time.monotonic()
        self._last_token_at: float | None = None
        self.ttft_s: float | None = None
        self.num_prompt_tokens = 0

    def start(self, prompts: Sequence[Prompt], eos_token_ids: tuple[int, ...]) -> None:
        """Submit. Raises: WireError if the request has no wire form."""
        sampling = self.call.sampling
        silent = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            silent |= frozenset(eos_token_ids)
        stop = StopStrings(self.call.stop) if self.call.stop else None
        rules = TextRules(stop, silent, sampling.min_tokens)
        self._choices = [Choice(ChoiceText(self._tokenizer, rules)) for _ in range(sampling.n)]
        (prompt,) = prompts
        self._prompt = prompt
        self.num_prompt_tokens = len(prompt.token_ids)
        self._stream = self._link.submit(Submit(self.answer.request_id, prompt.token_ids, sampling))

    def release(self) -> None:
        """Tell the scheduler that nobody reads any more."""
        if self._stream is not None:
            self._link.release(self._stream)

    @property
    def num_tokens(self) -> int:
        """Tokens generated, each choice up to its stop string."""
        return sum(choice.text.num_tokens for choice in self._choices)

    @property
    def finish_reasons(self) -> str:
        """For the log: one word a choice."""
        return ",".join(
            choice.ending.finish_reason if choice.ending else "open" for choice in self._choices
        )

    # ------------------------------------------------------------------ in one piece

    async def whole(self) -> web.Response:
        """The answer in one piece. Raises: Failure."""
        texts = [self._echo() for _ in self._choices]
        try:
            while not self._is_over:
                for piece in await self._reader.next():
                    texts[piece.sequence] += self._text_of(piece)
        except StreamRefused as error:
            raise failures.of_refusal(error.refused) from None
        endings = [choice.ending for choice in self._choices if choice.ending is not None]
        fields = self.answer.whole(list(zip(texts, endings, strict=True)), self._usage())
        self._observe_end()
        return web.json_response(fields, dumps=_readable_json)

    # ------------------------------------------------------------------ as a stream

    async def stream(
        self, request: web.Request, response: web.StreamResponse, ping_interval_s: float
    ) -> None:
        """Headers as soon as the request is taken, then events until [DONE].

        Raises: Failure while nothing was sent; later ones, and bugs of ours, are events.
        """
        try:
            await self._reader.wait_accepted(ping_interval_s)
        except StreamRefused as error:
            raise failures.of_refusal(error.refused) from None
        await response.prepare(request)
        failed = None
        try:
            closing = await self._tell(response, ping_interval_s)
        except StreamRefused as error:
            failed = failures.of_refusal(error.refused)
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
            self._observe_end()

    async def _tell(self, response: web.StreamResponse, ping_interval_s: float) -> bytes:
        """Events until all choices have ended; returns what comes before [DONE]."""
        await response.write(self._opening())
        sent_at = time.monotonic()
        while not self._is_over:
            wait_s = max(0.0, sent_at + ping_interval_s - time.monotonic())
            events = self._events(await self._reader.next(wait_s))
            if events is None and time.monotonic() - sent_at >= ping_interval_s:
                events = sse.PING  # tokens come, but none that is text yet
            if events is not None:
                await response.write(events)
                sent_at = time.monotonic()
        return self._closing()

    def _opening(self) -> bytes:
        """What a client gets before the model has computed anything."""
        events = []
        for index in range(len(self._choices)):
            if self.answer.endpoint == "chat":
                events.append(self.answer.event(self.answer.role(index), self._positions()))
            elif self.call.echo:
                events.append(
                    self.answer.event(self.answer.text(index, self._echo()), self._positions())
                )
        return b"".join(events) or sse.PING

    def _events(self, pieces: list[Piece]) -> bytes | None:
        """One write's worth; a ping if nothing came, None if nothing may go out yet."""
        if not pieces:
            return sse.PING
        events = []
        for piece in pieces:
            text = self._text_of(piece)
            if text:
                fields = self.answer.text(piece.sequence, text)
                events.append(self.answer.event(fields, self._positions()))
            ending = self._choices[piece.sequence].ending
            if ending is not None:
                fields = self.answer.end(piece.sequence, ending)
                events.append(self.answer.event(fields, self._positions()))
        return b"".join(events) or None

    def _closing(self) -> bytes:
        if self.call.stream is None or not self.call.stream.include_usage:
            return b""
        return self.answer.event(self.answer.usage(self._usage()), self._positions())

    # ------------------------------------------------------------------ tokens to text

    @property
    def _reader(self) -> AnswerStream:
        if self._stream is None:
            raise RuntimeError("start comes first")
        return self._stream

    @property
    def _is_over(self) -> bool:
        return all(choice.ending is not None for choice in self._choices)

    def _text_of(self, piece: Piece) -> str:
        """The text that a piece lets out; its choice may have ended afterwards."""
        choice = self._choices[piece.sequence]
        if choice.ending is not None:
            return ""
        self._observe(piece)
        text = choice.text.feed(piece.token_ids)
        if choice.text.matched is None and piece.finished is not None:
            self._raise_if_failed(piece.finished)
            text += choice.text.finish()
        if choice.text.matched is not None:
            choice.ending = Ending("stop", choice.text.matched)
            self._link.stop(self._reader, piece.sequence)
        elif piece.finished is not None:
            choice.ending = self._ending_of(piece.finished)
        return text

    def _ending_of(self, finished: Finished) -> Ending:
        stop_id = finished.stop_token_id
        named = stop_id if stop_id in self.call.sampling.stop_token_ids else None
        return Ending(finished.reason.value, named)

    def _raise_if_failed(self, finished: Finished) -> None:
        if finished.reason is FinishReason.ERROR:
            raise failures.of_finish(finished)

    def _observe(self, piece: Piece) -> None:
        if not piece.token_ids:
            return
        now = time.monotonic()
        if self._last_token_at is None:
            self.ttft_s = now - self._began
            gauges.TIME_TO_FIRST_TOKEN.observe(self.ttft_s)
        else:
            gauges.INTER_TOKEN_LATENCY.observe(now - self._last_token_at)
        self._last_token_at = now

    def _observe_end(self) -> None:
        gauges.E2E_LATENCY.observe(time.monotonic() - self._began)

    def _echo(self) -> str:
        return self._prompt.text if self.call.echo and self._prompt is not None else ""

    def _positions(self) -> list[int]:
        return [choice.text.num_tokens for choice in self._choices]

    def _usage(self) -> dict[str, int]:
        """Counted here: the scheduler's `Finished.usage` has what it made after a stop string."""
        return usage_fields(self.num_prompt_tokens, self.num_tokens)
