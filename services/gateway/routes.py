"""The HTTP paths: what they read, and what they answer."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import HttpVersion11, web

from services.gateway import failures, openai, sse
from services.gateway.answers import Answer, new_request_id
from services.gateway.call import Call, Prompt
from services.gateway.chat import ChatTemplate
from services.gateway.generation import Generation
from services.gateway.link import SchedulerLink
from services.gateway.request_body import parse_object
from services.gateway.tokenizer import Tokenizer
from shared.errors import ErrorCode, InvalidField, PromptTooLong, RequestError
from shared.messages import Welcome
from shared.metrics import metrics_page
from shared.sampling import check_sampling
from shared.version import VERSION

OUTCOME: Final = web.RequestKey("outcome", dict[str, Any])
"""What the request's log line says beside path and status."""

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The client's X-Request-Id, or one of ours: echoed, never used inside."""

_COUNT_BELOW_BYTES: Final = 2**20
_PARSE_AT_ONCE_BYTES: Final = 2**16  # some milliseconds; larger bodies are read in a thread


class PromptFarTooLong(RequestError):
    """A prompt that cannot fit, by its size alone: counting its tokens would take seconds."""

    code = ErrorCode.CONTEXT_LENGTH

    def __init__(self, least_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt has at least {least_tokens} tokens; with one token to generate, fewer than "
            f"{max_model_len} fit (--max-model-len): shorten it",
            "prompt",
        )


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes and seconds of one request."""

    max_body_bytes: int
    read_timeout_s: float
    ping_interval_s: float


class Routes:
    """Everything a gateway answers; `is_draining` says that it is about to leave."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        served_names: tuple[str, ...],
        limits: HttpLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer.chat) if tokenizer.chat is not None else None
        self._link = link
        self._served_names = served_names
        self._limits = limits
        self._created = int(time.time())
        self.is_draining = False

    def add_to(self, app: web.Application) -> None:
        """Register all paths."""
        app.router.add_post("/v1/completions", self.completions, expect_handler=_expect)
        app.router.add_post("/v1/chat/completions", self.chat_completions, expect_handler=_expect)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", metrics_page)
        app.router.add_get("/health", self.ready)
        app.router.add_get("/health/ready", self.ready)
        app.router.add_get("/health/live", self.live)

    # ------------------------------------------------------------------ generating

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(request, await self._read(request, openai.parse_completion))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        call = await self._read(request, openai.parse_chat)
        if self._chat is None:
            raise InvalidField(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        return await self._answer(request, call)

    async def _answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        try:
            return await self._carry_out(request, call)
        except (failures.Failure, RequestError) as error:
            error.message, error.param = call.in_client_words(error.message, error.param)
            raise

    async def _carry_out(self, request: web.Request, call: Call) -> web.StreamResponse:
        model = self._served(call.model, "model")
        welcome = self._welcome()
        check_sampling(call.sampling, welcome.shape.vocab_size, welcome.eos_token_ids)
        answer = Answer(call.endpoint, new_request_id(call.endpoint, secrets.token_hex(16)), model)
        generation = Generation(call, answer, self._tokenizer, self._link)
        prompt = await asyncio.to_thread(self._encode, call, welcome.max_model_len)
        welcome = self._welcome()  # meanwhile we may have begun to drain, or lost the scheduler
        try:
            generation.start([prompt], welcome.eos_token_ids)
            if call.stream is None:
                return await generation.whole()
            response = web.StreamResponse(headers=sse.HEADERS)
            response.headers["X-Request-Id"] = request[REQUEST_ID]
            await generation.stream(request, response, self._limits.ping_interval_s)
            return response
        finally:
            generation.release()
            request[OUTCOME] = _outcome(generation)

    def _encode(self, call: Call, max_model_len: int) -> Prompt:
        """The prompt's tokens. Raises: InvalidField or PromptTooLong, naming the field."""
        if call.chat is not None and self._chat is not None:
            text = self._chat.render(call.chat.messages)
        else:
            text = str(call.prompts[0])
        size = len(text.encode())
        least_tokens = size // self._tokenizer.longest_token_bytes
        if size > _COUNT_BELOW_BYTES and least_tokens > max_model_len:
            raise PromptFarTooLong(least_tokens, max_model_len)
        token_ids = self._tokenizer.encode(text, add_special_tokens=call.chat is None)
        if not token_ids:
            raise InvalidField("prompt", "has no tokens; write some text")
        if len(token_ids) > max_model_len:
            raise PromptTooLong(len(token_ids), max_model_len, call.sampling.max_tokens or 0)
        return Prompt(token_ids, text)

    async def _read(self, request: web.Request, parse: Callable[[dict[str, Any]], Call]) -> Call:
        """What the request's body asks. Raises: Failure or RequestError."""
        self._check_head(request)
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                await _continue(request)
                body = await request.read()
        except TimeoutError:
            raise failures.read_timeout(self._limits.read_timeout_s) from None
        except web.HTTPRequestEntityTooLarge:
            raise failures.too_large(self._limits.max_body_bytes) from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise failures.Failure(
                400,
                "the body cannot be read: its length, its chunks or its compression is broken",
                "bad_request",
                close=True,
            ) from error
        if len(body) <= _PARSE_AT_ONCE_BYTES:
            return parse(parse_object(body))
        return await asyncio.to_thread(lambda: parse(parse_object(body)))

    def _check_head(self, request: web.Request) -> None:
        """Refuse a body by what its head says. Raises: Failure."""
        if request.content_type != "application/json":
            raise failures.Failure(
                415,
                f"Content-Type is {request.headers.get('Content-Type', 'missing')[:64]!r}: send "
                "application/json",
                "unsupported_media_type",
            )
        charset = (request.charset or "utf-8").lower()
        if charset not in ("utf-8", "utf8", "us-ascii"):
            raise failures.Failure(
                415, f"charset {charset[:40]!r}: send UTF-8", "unsupported_media_type"
            )
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "deflate"):
            raise failures.unsupported_encoding()
        limit = self._limits.max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            raise failures.too_large(limit)

    def _served(self, model: str | None, param: str) -> str:
        """The name to answer with. Raises: Failure 404 for a model that is not served."""
        if model is None:
            return self._served_names[0]
        if model not in self._served_names:
            raise failures.Failure(
                404,
                f"the model {model[:200]!r} does not exist here; this server has "
                f"{', '.join(self._served_names)}",
                "model_not_found",
                param,
            )
        return model

    def _welcome(self) -> Welcome:
        """What is known of the model, once requests are taken. Raises: Failure 503."""
        if self.is_draining:
            raise failures.shutting_down()
        welcome = self._link.scheduler.welcome
        if welcome is None or not self._link.scheduler.takes_requests:
            raise failures.unavailable(f"not ready: {self._link.scheduler.phase}; try again")
        return welcome

    # ------------------------------------------------------------------ telling

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response(
            {"object": "list", "data": [self._model_card(name) for name in self._served_names]}
        )

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = self._served(request.match_info["model"], "model")
        return web.json_response(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        welcome = self._link.scheduler.welcome
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitflap",
            "root": self._served_names[0],
            "parent": None,
            "max_model_len": welcome.max_model_len if welcome else None,
        }

    async def version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": VERSION})

    async def ready(self, _request: web.Request) -> web.Response:
        """GET /health and /health/ready: 200, or 503 and what is missing."""
        phase = "draining" if self.is_draining else self._link.scheduler.phase
        if not phase:
            return web.json_response({"status": "ready"})
        headers = {"Retry-After": str(failures.RETRY_AFTER_S)}
        return web.json_response(
            {"status": "not ready", "phase": phase}, status=503, headers=headers
        )

    async def live(self, _request: web.Request) -> web.Response:
        """GET /health/live: this process answers."""
        return web.json_response({"status": "live"})


async def _expect(_request: web.Request) -> None:
    """Nothing yet: `_read` asks for the body once the head has passed."""


async def _continue(request: web.Request) -> None:
    """Tell a client that asks first to send its body. Raises: Failure for any other `Expect`."""
    expect = request.headers.get("Expect", "").lower()
    if not expect or request.version < HttpVersion11:
        return
    if expect != "100-continue":
        raise failures.expectation_failed()
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # it is no part of the answer


def _outcome(generation: Generation) -> dict[str, Any]:
    ttft_s = generation.ttft_s
    return {
        "id": generation.answer.request_id,
        "prompt_tokens": generation.num_prompt_tokens,
        "completion_tokens": generation.num_tokens,
        "finish": generation.finish_reasons,
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 1),
    }
