"""Streams that were cut off, and go on: GET /v1/streams/{id}, or a POST that names its last event.

What a client has is its `Last-Event-ID`; the rest is at the scheduler, so any gateway can tell it.
Whoever still reads the stream elsewhere is cut off: it is its client that has come back.
"""

import time
from collections.abc import Callable
from typing import Final

from aiohttp import web

from services.gateway import failures, sse
from services.gateway.answer_stream import AnswerStream
from services.gateway.answers import PREFIXES
from services.gateway.call import Endpoint, Prompt
from services.gateway.connection_clock import clock_of
from services.gateway.event_id import Told, is_request_id, read_event_id
from services.gateway.generation import Generation
from services.gateway.keys import ALLOWANCE, KEY_HASH
from services.gateway.link import SchedulerLink
from services.gateway.outcome import OUTCOME, REQUEST_ID, outcome_of
from services.gateway.request_reading import ARRIVED_AT, HttpLimits, read_body
from services.gateway.stream_context import (
    NotUnderstood,
    StreamContext,
    request_id_of,
    unpacked,
)
from services.gateway.tokenizer import Tokenizer
from shared.ids import RequestId
from shared.messages import Refused, Welcome

LAST_EVENT_ID: Final = "Last-Event-ID"

_ATTACH_S: Final = 10.0
_RETRY: Final = b"retry: 1000\n\n"  # for browsers, which come back by themselves: after 1 s


class StreamRoutes:
    """`welcome` gives what is known of the model, or raises Failure 503."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        limits: HttpLimits,
        stream_interval: int,
        welcome: Callable[[], Welcome],
    ) -> None:
        self._tokenizer = tokenizer
        self._link = link
        self._limits = limits
        self._stream_interval = stream_interval
        self._welcome = welcome

    def add_to(self, app: web.Application) -> None:
        """Register the path."""
        app.router.add_get("/v1/streams/{id}", self.one, allow_head=False)

    async def one(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: on after Last-Event-ID, or all from the beginning."""
        request[ARRIVED_AT] = time.monotonic()
        call_id = request.match_info["id"]
        if not is_request_id(call_id):
            raise failures.unknown_stream("no such stream: its id is that of each of its chunks")
        told = Told()
        if request.headers.get(LAST_EVENT_ID):
            named, told = _last_event(request)
            if named != call_id:
                raise failures.bad_event_id(f"is one of {named}, not of this stream")
        return await self._go_on(request, RequestId(call_id), told, _RETRY)

    async def again(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """POST with Last-Event-ID: the same, and the body asks nothing."""
        await read_body(request, self._limits)
        call_id, told = _last_event(request)
        if not call_id.startswith(PREFIXES[endpoint]):
            raise failures.bad_event_id("is one of the other endpoint that generates; ask there")
        return await self._go_on(request, call_id, told)

    async def _go_on(
        self, request: web.Request, call_id: RequestId, told: Told, preface: bytes = b""
    ) -> web.StreamResponse:
        welcome = self._welcome()
        streams: list[AnswerStream] = []
        generation = None
        try:
            context, prompts = await self._attach(call_id, request[KEY_HASH], streams)
            _check_places(told, context.num_prompts * context.call.sampling.n)
            generation = Generation(
                context.call,
                context.answer,
                self._tokenizer,
                self._link,
                self._stream_interval,
                arrived_at=time.monotonic() - streams[0].submit.age_s,
                clock=clock_of(request.transport),
            )
            generation.take_over(streams, prompts, welcome.eos_token_ids, told)
            response = web.StreamResponse(headers=sse.HEADERS)
            response.headers["X-Request-Id"] = request[REQUEST_ID]
            await generation.stream(request, response, self._limits.ping_interval_s, preface)
            return response
        finally:
            if generation is not None:
                generation.release()
                num_known = sum([place.num_tokens for place in told.places])
                request[ALLOWANCE].spend(max(0, generation.num_tokens - num_known))
                request[OUTCOME] = outcome_of(generation)
            else:
                for stream in streams:
                    self._link.release(stream, keeps=True)

    async def _attach(
        self, call_id: RequestId, key_hash: bytes, streams: list[AnswerStream]
    ) -> tuple[StreamContext, list[Prompt]]:
        """Take over all requests of a call: into `streams`, so that none is lost on the way.

        Raises: Failure.
        """
        streams.append(await self._attach_one(call_id, key_hash))
        context, prompt = _unpacked(streams[0])
        if context.answer.request_id != call_id:
            raise failures.unknown_stream(f"no such stream: {call_id} is a part of one")
        prompts = [prompt]
        for number in range(1, context.num_prompts):
            streams.append(await self._attach_one(request_id_of(call_id, number), key_hash))
            prompts.append(_unpacked(streams[-1])[1])
        return context, prompts

    async def _attach_one(self, request_id: RequestId, key_hash: bytes) -> AnswerStream:
        try:
            answer = await self._link.attach(request_id, key_hash, _ATTACH_S)
        except TimeoutError:
            raise failures.unavailable(
                f"the scheduler has not said within {_ATTACH_S:g} s whether it has this stream; "
                "try again"
            ) from None
        if isinstance(answer, Refused):
            raise failures.of_refusal(answer)
        return answer


def _last_event(request: web.Request) -> tuple[RequestId, Told]:
    given = request.headers[LAST_EVENT_ID]
    read = read_event_id(given)
    if read is None:
        raise failures.bad_event_id(f"{given[:64]!r} is no id of an event of this server")
    return read


def _check_places(told: Told, num_choices: int) -> None:
    if told.places and len(told.places) != num_choices:
        raise failures.bad_event_id(
            f"speaks of {len(told.places)} choices; this stream has {num_choices}"
        )


def _unpacked(stream: AnswerStream) -> tuple[StreamContext, Prompt]:
    try:
        return unpacked(stream.submit)
    except NotUnderstood as error:
        raise failures.unknown_stream(
            f"this stream was begun by another version of this server ({error}); ask again"
        ) from error
