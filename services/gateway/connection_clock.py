"""Two clocks on a connection: one for requests that never arrive, one for answers nobody takes."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from services.gateway import failures
from shared.logs import get_logger

_log = get_logger("http")


@dataclass(frozen=True, slots=True)
class ClockTimes:
    """Seconds: for a request's head to arrive, and without a byte of an answer being taken."""

    head_s: float
    stall_s: float


class ConnectionClock(asyncio.Protocol):
    """Stands between a connection and its HTTP protocol.

    aiohttp has a timeout for idle connections and we have one for bodies; what is left are heads
    that never end (each request's, and the silence before a connection's first one) and clients
    that read nothing while we write.
    """

    def __init__(self, inner: asyncio.Protocol, times: ClockTimes) -> None:
        self._inner = inner
        self._times = times
        self._transport: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._awaits_head = True
        self._has_part_of_head = False
        self._unsent_bytes = 0
        self.has_stalled = False
        """Its client took nothing for so long that the connection was ended."""

    # ------------------------------------------------------------------ what the handler says

    def request_began(self) -> None:
        """The head is whole."""
        self._awaits_head = False
        self._stop_head_timer()

    def request_ended(self) -> None:
        """All of the request has come and it was answered: the next byte begins another one."""
        self._awaits_head, self._has_part_of_head = True, False

    # ------------------------------------------------------------------ what the connection says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the first request's clock."""
        self._transport = cast(asyncio.Transport, transport)
        self._start_head_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on; the first byte of a later request starts its clock."""
        if self._awaits_head and not self._has_part_of_head and data.strip(b"\r\n"):
            self._has_part_of_head = True  # empty lines before a request are no request
            if self._head_timer is None:
                self._start_head_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop both clocks."""
        self._stop_head_timer()
        self._stop_stall_timer()
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """The client takes less than we have for it: watch whether it takes anything."""
        self._watch_progress()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._stop_stall_timer()
        self._inner.resume_writing()

    # ------------------------------------------------------------------ time

    def _start_head_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._times.head_s, self._refuse)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._has_part_of_head:
            failure = failures.read_timeout(self._times.head_s)
            body = json.dumps(failure.fields).encode()
            self._transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
        self._transport.close()

    def _watch_progress(self) -> None:
        if self._transport is None:
            return
        self._unsent_bytes = self._transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._times.stall_s, self._check_progress)

    def _check_progress(self) -> None:
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() != self._unsent_bytes:
            self._watch_progress()
            return
        _log.warning("client_stalled", unsent_bytes=self._unsent_bytes, for_s=self._times.stall_s)
        self.has_stalled = True
        self._transport.abort()  # cancels the handler, and so the request


def clocked(
    make_inner: Callable[[], asyncio.Protocol], times: ClockTimes
) -> Callable[[], ConnectionClock]:
    """A protocol factory for `loop.create_server`."""
    return lambda: ConnectionClock(make_inner(), times)


def clock_of(transport: asyncio.Transport | None) -> ConnectionClock | None:
    """The clock that stands on a connection, if it is still open."""
    protocol = transport.get_protocol() if transport is not None else None
    return protocol if isinstance(protocol, ConnectionClock) else None
