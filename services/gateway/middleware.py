"""Around every request: errors in one form, ids echoed, one log line, counts."""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from services.gateway import bodies, failures, gauges, prefix_models
from services.gateway.body_fields import NEUTRAL, REFUSED
from services.gateway.connection_clock import clock_of
from services.gateway.failures import Failure
from services.gateway.keys import KEY_NAME
from services.gateway.outcome import OUTCOME, REQUEST_ID
from shared.errors import RequestError
from shared.logs import get_logger

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PRINTABLE: Final = re.compile(r"[!-~]{1,128}")
_FIELDS: Final = frozenset(NEUTRAL.keys() | REFUSED).union(
    *[
        body.model_fields
        for body in (
            bodies.CompletionBody,
            bodies.ChatBody,
            bodies.TokenizeTextBody,
            bodies.TokenizeChatBody,
            bodies.DetokenizeBody,
            prefix_models.PrefixTextBody,
            prefix_models.PrefixChatBody,
        )
    ]
)

_log = get_logger("http")


@web.middleware
async def around(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors as JSON, echo X-Request-Id, count, and log the request as one event."""
    began = time.monotonic()
    request[REQUEST_ID] = _client_id(request)
    clock = clock_of(request.transport)
    if clock is not None:
        clock.request_began()
    try:
        response = await _answered(request, handler)
    except BaseException as error:
        is_gone = isinstance(error, asyncio.CancelledError | ConnectionError)
        _note(request, failures.CLIENT_GONE if is_gone else 500, began)
        raise
    if not response.prepared:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    _note(request, response.status, began)
    return response


async def _answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Failure as failure:
        return _failed(request, failure)
    except RequestError as error:
        return _failed(request, failures.of_request_error(error))
    except web.HTTPException as error:
        return _failed(request, failures.of_http(error))
    except ConnectionError:
        raise
    except Exception:
        _log.exception("request_failed", path=request.path[:200])
        if request.writer.output_size > 0:  # an answer has begun: it can only break off
            raise
        return _failed(request, failures.internal())


def _failed(request: web.Request, failure: Failure) -> web.Response:
    request[OUTCOME] = {"code": failure.code, "param": _loggable(failure.param)}
    gauges.REQUESTS_REJECTED.labels(reason=failure.code).inc()
    return failure.response()


def _loggable(param: str | None) -> str | None:
    """The field that is to blame, if it is one of ours: any other name is a client's own words."""
    name = re.split(r"[.\[]", param or "")[0]
    return name if name in _FIELDS else None


def _client_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _PRINTABLE.fullmatch(given) else secrets.token_hex(16)


def _note(request: web.Request, status: int, began: float) -> None:
    seconds = time.monotonic() - began
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "unmatched"
    gauges.HTTP_REQUESTS.labels(path=path, status=str(status)).inc()
    outcome = request.get(OUTCOME, {})
    is_watching = path.startswith(("/health", "/metrics"))  # again and again, by machines
    say = _log.debug if is_watching else _log.info
    sent = request.headers.get("X-Request-Id")
    say(
        "request_finished",
        method=request.method,
        path=request.path[:200],
        status=status,
        duration_ms=round(seconds * 1e3, 1),
        key=request.get(KEY_NAME),
        client_request_id=sent if sent == request[REQUEST_ID] else None,  # left out of the line
        **outcome,
    )
