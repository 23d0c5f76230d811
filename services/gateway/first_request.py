"""A connection that sends half a request's head and hangs is told so and closed."""

import asyncio
import json
from collections.abc import Callable
from typing import Final, cast

from services.gateway import failures

_HEAD_ENDS: Final = (b"\r\n\r\n", b"\n\n")


class FirstRequestClock(asyncio.Protocol):
    """Stands before a connection's HTTP protocol until the first request's head is whole.

    aiohttp has timeouts for idle connections and we have one for bodies; this one is for heads.
    """

    def __init__(self, inner: asyncio.Protocol, timeout_s: float) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._hang_up)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on; step aside once the head is whole."""
        seen = self._tail + data
        if not self._tail:
            seen = seen.lstrip(b"\r\n")  # empty lines before a request are no request
        self._tail = seen[-3:]
        if self._transport is not None and any(end in seen for end in _HEAD_ENDS):
            self._stop_clock()
            self._transport.set_protocol(self._inner)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Pass on."""
        self._stop_clock()
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._inner.resume_writing()

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._tail:
            failure = failures.read_timeout(self._timeout_s)
            body = json.dumps(failure.fields).encode()
            self._transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
        self._transport.close()


def clocked(
    make_inner: Callable[[], asyncio.Protocol], timeout_s: float
) -> Callable[[], FirstRequestClock]:
    """A protocol factory for `loop.create_server`."""
    return lambda: FirstRequestClock(make_inner(), timeout_s)
