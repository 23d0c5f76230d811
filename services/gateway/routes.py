"""The HTTP paths: what they read, and what they answer."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from services.gateway import failures, openai, sse
from services.gateway.answers import PREFIXES, Answer, boot_tag, new_request_id, seed_of
from services.gateway.call import Call, Endpoint
from services.gateway.chat import ChatTemplate
from services.gateway.connection_clock import clock_of
from services.gateway.encoding import Encoder
from services.gateway.event_id import Told
from services.gateway.generation import Generation
from services.gateway.keys import ALLOWANCE, KEY_HASH
from services.gateway.link import SchedulerLink
from services.gateway.models import ServedModels
from services.gateway.openapi import document
from services.gateway.openapi_schemas import Facts
from services.gateway.outcome import OUTCOME, REQUEST_ID, outcome_of
from services.gateway.prefix_routes import PrefixRoutes
from services.gateway.request_reading import (
    ARRIVED_AT,
    HttpLimits,
    body_of,
    check_head,
    expect_nothing_yet,
    parsed,
    read_body,
)
from services.gateway.stream_routes import LAST_EVENT_ID, StreamRoutes, check_places, last_event
from services.gateway.tokenize_routes import TokenizeRoutes
from services.gateway.tokenizer import Tokenizer
from shared.errors import ErrorCode, RequestError
from shared.ids import RequestId
from shared.liveness import SILENCE_S
from shared.messages import Activity, Welcome
from shared.metrics import metrics_page
from shared.version import VERSION


class Routes:
    """Everything a gateway answers; `is_draining` says that it is about to leave."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        served_names: tuple[str, ...],
        limits: HttpLimits,
        stream_interval: int = 1,
        *,
        needs_key: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat) if tokenizer.chat is not None else None
        self._encoder = Encoder(tokenizer, self._template)
        self._link = link
        self._limits = limits
        self._stream_interval = stream_interval
        self._needs_key = needs_key
        self._models = ServedModels(served_names, link)
        self._tokenize = TokenizeRoutes(tokenizer, self._encoder, link, self._models, limits)
        self._prefixes = PrefixRoutes(self._encoder, link.pins, self._models, limits, self._welcome)
        self._streams = StreamRoutes(tokenizer, link, limits, stream_interval, self._welcome)
        self.is_draining = False

    def check_template(self) -> None:
        """Raises: StartError if the model's chat template is none."""
        if self._template is not None:
            self._template.check()

    def close(self) -> None:
        """Give back the process that renders chats."""
        if self._template is not None:
            self._template.close()

    def add_to(self, app: web.Application) -> None:
        """Register all paths."""
        app.router.add_post("/v1/completions", self.completions, expect_handler=expect_nothing_yet)
        app.router.add_post(
            "/v1/chat/completions", self.chat_completions, expect_handler=expect_nothing_yet
        )
        self._models.add_to(app)
        self._tokenize.add_to(app)
        self._prefixes.add_to(app)
        self._streams.add_to(app)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", metrics_page)
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/health", self.ready)
        app.router.add_get("/health/ready", self.ready)
        app.router.add_get("/health/live", self.live)

    # ------------------------------------------------------------------ generating

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        if request.headers.get(LAST_EVENT_ID):
            return await self._again(request, "completion", openai.parse_completion)
        call = await body_of(request, self._limits, openai.parse_completion)
        return await self._answer(request, call)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        if request.headers.get(LAST_EVENT_ID):
            return await self._again(request, "chat", openai.parse_chat)
        call = await body_of(request, self._limits, openai.parse_chat)
        return await self._answer(request, call)

    async def _again(
        self, request: web.Request, endpoint: Endpoint, parse: Callable[[dict[str, Any]], Call]
    ) -> web.StreamResponse:
        """Go on behind Last-Event-ID.

        If the scheduler that had the stream is gone, and its log with it, and the body says what
        was asked, it is generated once more, which gives the same tokens, and the rest is told.
        """
        body = await read_body(request, self._limits)
        call_id, told = last_event(request)
        if not call_id.startswith(PREFIXES[endpoint]):
            raise failures.bad_event_id("is one of the other endpoint that generates; ask there")
        try:
            return await self._streams.go_on(request, call_id, told)
        except failures.Failure as failure:
            is_unknown = failure.code == ErrorCode.UNKNOWN_STREAM
            if not (is_unknown and body and await self._has_lost_its_scheduler(call_id)):
                raise
        check_head(request, self._limits.max_body_bytes)
        call = await parsed(body, parse)
        if call.stream is None:
            raise failures.bad_event_id("is one of a stream: set stream to true, as before")
        return await self._answer(request, call, call_id, told)

    async def _has_lost_its_scheduler(self, call_id: RequestId) -> bool:
        """Whether the scheduler that does not know this stream is not the one that began it.

        A new one may have been asked, and have answered, before it said that it is new.
        Raises: Failure 503 if it does not say so at all.
        """
        scheduler = self._link.scheduler
        if scheduler.boot is not None and call_id.endswith(boot_tag(scheduler.boot)):
            try:
                await scheduler.next_beat(SILENCE_S)
            except TimeoutError:
                raise failures.unavailable("the scheduler has fallen silent; try again") from None
        return scheduler.boot is not None and not call_id.endswith(boot_tag(scheduler.boot))

    async def _answer(
        self,
        request: web.Request,
        call: Call,
        call_id: RequestId | None = None,
        told: Told | None = None,
    ) -> web.StreamResponse:
        """Carry a call out: a new one, or one that its client has been told the beginning of."""
        try:
            return await self._carry_out(request, call, call_id, told)
        except (failures.Failure, RequestError) as error:
            error.message, error.param = call.in_client_words(error.message, error.param)
            raise

    async def _carry_out(
        self, request: web.Request, call: Call, call_id: RequestId | None, told: Told | None
    ) -> web.StreamResponse:
        model = self._models.named(call.model)
        welcome = self._welcome()
        if call_id is None:
            random_hex = secrets.token_hex(12) + boot_tag(welcome.boot)
            call_id = new_request_id(call.endpoint, random_hex)
        answer = Answer(call.endpoint, call_id, model)
        if not call.is_seeded:
            call = replace(call, sampling=replace(call.sampling, seed=seed_of(call_id)))
        generation = Generation(
            call,
            answer,
            self._tokenizer,
            self._link,
            self._stream_interval,
            arrived_at=request[ARRIVED_AT],
            clock=clock_of(request.transport),
        )
        sampling, prompts = await asyncio.to_thread(self._encoder.encode, call, welcome)
        generation.call = replace(call, sampling=sampling)
        if told is not None:
            check_places(told, len(prompts) * sampling.n)
            generation.begin_again(told)
        allowance = request[ALLOWANCE]
        allowance.admit_prompt(sum([len(prompt.token_ids) for prompt in prompts]))
        welcome = self._welcome()  # meanwhile we may have begun to drain, or lost the scheduler
        try:
            await generation.start(prompts, welcome.eos_token_ids, request[KEY_HASH])
            if call.stream is None:
                return await generation.whole()
            response = web.StreamResponse(headers=sse.HEADERS)
            response.headers["X-Request-Id"] = request[REQUEST_ID]
            await generation.stream(request, response, self._limits.ping_interval_s)
            return response
        finally:
            generation.release()
            allowance.spend(generation.num_tokens)
            request[OUTCOME] = outcome_of(generation)

    def _welcome(self) -> Welcome:
        """What is known of the model, once requests are taken. Raises: Failure 503."""
        if self.is_draining:
            raise failures.shutting_down()
        welcome = self._link.scheduler.welcome
        if welcome is None or not self._link.scheduler.takes_requests:
            advice = "" if self._link.scheduler.is_mismatched else "; try again"
            raise failures.unavailable(f"not ready: {self._link.scheduler.phase}{advice}")
        return welcome

    # ------------------------------------------------------------------ telling

    async def version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": VERSION})

    async def openapi(self, _request: web.Request) -> web.Response:
        """GET /openapi.json: what this server takes and answers."""
        welcome = self._link.scheduler.welcome
        vocab_size = self._tokenizer.vocab_size
        facts = Facts(
            self._models.names,
            vocab_size if welcome is None else welcome.shape.vocab_size,
            None if welcome is None else welcome.max_model_len,
            self._needs_key,
        )
        return web.json_response(document(facts))

    async def ready(self, _request: web.Request) -> web.Response:
        """GET /health and /health/ready: 200 if idle or busy; or 503, and what is missing."""
        scheduler = self._link.scheduler
        status, phase = scheduler.activity.value, scheduler.phase
        if self.is_draining:
            status = phase = "draining"
        elif phase:
            status = "loading"
        elif scheduler.activity is Activity.STALLED:
            phase = "no step has come back from the executor for too long"
        if not phase:
            return web.json_response({"status": status})
        headers = {"Retry-After": str(failures.RETRY_AFTER_S)}
        return web.json_response({"status": status, "phase": phase}, status=503, headers=headers)

    async def live(self, _request: web.Request) -> web.Response:
        """GET /health/live: this process answers."""
        return web.json_response({"status": "live"})
