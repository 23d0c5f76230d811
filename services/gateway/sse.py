"""Server-sent events as bytes (WHATWG HTML, server-sent events)."""

import json
from collections.abc import Mapping
from typing import Any, Final

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
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}data: {text}\n\n".encode()
