"""A request's body, from its head to what it asks: refused as soon as it is known to be bad."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiohttp import HttpVersion11, web

from services.gateway import failures
from services.gateway.request_body import parse_object

_PARSE_AT_ONCE_BYTES: Final = 2**16  # some milliseconds; larger bodies are read in a thread

ARRIVED_AT: Final = web.RequestKey("arrived_at", float)
"""When the request was there, to its last byte (monotonic seconds)."""

_Asked = TypeVar("_Asked")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes and seconds of one request."""

    max_body_bytes: int
    read_timeout_s: float
    ping_interval_s: float


async def body_of(
    request: web.Request, limits: HttpLimits, parse: Callable[[dict[str, Any]], _Asked]
) -> _Asked:
    """What the request's body asks; notes ARRIVED_AT. Raises: Failure or RequestError."""
    _check_head(request, limits.max_body_bytes)
    body = await read_body(request, limits)
    if len(body) <= _PARSE_AT_ONCE_BYTES:
        return parse(parse_object(body))
    return await asyncio.to_thread(lambda: parse(parse_object(body)))


async def read_body(request: web.Request, limits: HttpLimits) -> bytes:
    """All of a body, within its limits; notes ARRIVED_AT. Raises: Failure."""
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            await _continue(request)
            body = await request.read()
    except TimeoutError:
        raise failures.read_timeout(limits.read_timeout_s) from None
    except web.HTTPRequestEntityTooLarge:
        raise failures.too_large(limits.max_body_bytes) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise failures.Failure(
            400,
            "the body cannot be read: its length, its chunks or its compression is broken",
            "bad_request",
            close=True,
        ) from error
    request[ARRIVED_AT] = time.monotonic()
    return body


async def expect_nothing_yet(_request: web.Request) -> None:
    """aiohttp's answer to `Expect`: `body_of` asks for the body once the head has passed."""


def _check_head(request: web.Request, max_body_bytes: int) -> None:
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
    if request.content_length is not None and request.content_length > max_body_bytes:
        raise failures.too_large(max_body_bytes)


async def _continue(request: web.Request) -> None:
    """Tell a client that asks first to send its body. Raises: Failure for any other `Expect`."""
    expect = request.headers.get("Expect", "").lower()
    if not expect or request.version < HttpVersion11:
        return
    if expect != "100-continue":
        raise failures.expectation_failed()
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # it is no part of the answer
