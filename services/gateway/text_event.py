"""An event that tells text and nothing else: most of all events, so all but the text is ready."""

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring  # a string as JSON, other scripts as they are
from typing import Any, Final

from services.gateway import sse
from services.gateway.answers import Answer
from services.gateway.event_id import event_id
from services.gateway.json_portions import dumps

_NO_TEXT: Final = {"completion": '"text":""', "chat": '"content":""'}
"""How the place of the text is written. Within a string its quotes would have backslashes."""


class TextEvent:
    """The events of one choice, `extras` being the other fields of their objects."""

    def __init__(self, answer: Answer, index: int, extras: Mapping[str, Any]) -> None:
        self._request_id = answer.request_id
        event = sse.on_one_line(dumps(answer.chunk((answer.text(index, ""),), **extras)))
        head, place, tail = event.rpartition(_NO_TEXT[answer.endpoint])
        self._head = f"data: {head}{place[:-2]}"
        self._tail = tail + "\n\n"

    def of(self, text: str, positions: Sequence[str]) -> bytes:
        """The event of this text, byte by byte what `Answer.event` makes of it."""
        head = sse.id_line(event_id(self._request_id, positions))
        quoted = sse.on_one_line(encode_basestring(text))
        return f"{head}{self._head}{quoted}{self._tail}".encode()
