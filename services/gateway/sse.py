"""Server-sent events as bytes (WHATWG HTML, server-sent events)."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.gateway.json_portions import dumps, portions

HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

_LINE_ENDS: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Not line ends of this format, but many clients split lines with their language's rules."""


def event(fields: Mapping[str, Any], event_id: str | None = None) -> bytes:
    """One event; `event_id` is what a client gives back to go on from here."""
    return f"{id_line(event_id)}data: {on_one_line(dumps(fields))}\n\n".encode()


def event_portions(fields: Mapping[str, Any], event_id: str | None = None) -> Iterator[bytes]:
    """The same, of fields that hold a `LongList`."""
    yield f"{id_line(event_id)}data: ".encode()
    for portion in portions(fields):
        yield on_one_line(portion).encode()
    yield b"\n\n"


def id_line(event_id: str | None) -> str:
    """What an event begins with."""
    return "" if event_id is None else f"id: {event_id}\n"


def on_one_line(text: str) -> str:
    """JSON as it may stand in an event, in which no reader sees the end of a line."""
    return text if text.isascii() else text.translate(_LINE_ENDS)
