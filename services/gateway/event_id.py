"""An event's id: how much of each choice its client has been told once it has that event.

    cmpl-X:12.3t.-     of choice 0 the text that 12 tokens let out; of choice 1, which has ended
                       with 3, all text, but not yet its end; of choice 2 nothing
    cmpl-X:12e.3e.4e   every choice has ended
    cmpl-X:done        and the usage is told: only [DONE] is missing

A client gives back the last one it got (`Last-Event-ID`), and any gateway goes on from there: what
is told of a choice is a function of its tokens alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.ids import RequestId

MAX_COUNTED_CHOICES: Final = 128  # an id of some 500 bytes
MAX_ID_CHARACTERS: Final = 256

_DONE: Final = "done"
_PLACE: Final = re.compile(r"(-)|([0-9]{1,9})([te]?)")
_REQUEST_ID: Final = re.compile(r"(cmpl|chatcmpl)-[0-9a-zA-Z-]{1,200}")


@dataclass(frozen=True, slots=True)
class Place:
    """How much of one choice is told.

    `is_open`: its first event is out. `has_text`: all of its text, also what was held back. Then
    it has ended, which `has_end` says is told too.
    """

    num_tokens: int = 0
    is_open: bool = False
    has_text: bool = False
    has_end: bool = False

    def __str__(self) -> str:
        if not self.is_open:
            return "-"
        return f"{self.num_tokens}{'e' if self.has_end else 't' if self.has_text else ''}"


@dataclass(frozen=True, slots=True)
class Told:
    """What a client has of an answer; without places it has nothing."""

    places: tuple[Place, ...] = ()
    is_done: bool = False


def event_id(request_id: RequestId, positions: Sequence[str]) -> str | None:
    """The id of an event behind which every choice is told so far (`str` of its `Place`).

    None where there are very many choices: their places would be most of the stream's bytes.
    """
    if len(positions) > MAX_COUNTED_CHOICES:
        return None
    return f"{request_id}:{'.'.join(positions)}"


def last_event_id(request_id: RequestId) -> str:
    """The id of what comes after every choice."""
    return f"{request_id}:{_DONE}"


def read_event_id(text: str) -> tuple[RequestId, Told] | None:
    """Whose event it is, and what its client has been told; None if it is no id of ours."""
    request_id, _, positions = text.partition(":")
    if not is_request_id(request_id):
        return None
    if positions == _DONE:
        return RequestId(request_id), Told(is_done=True)
    matches = [_PLACE.fullmatch(part) for part in positions.split(".")]
    if len(matches) > MAX_COUNTED_CHOICES:
        return None
    places = []
    for match in matches:
        if match is None:
            return None
        _, number, state = match.groups()
        places.append(
            Place()
            if number is None
            else Place(int(number), is_open=True, has_text=bool(state), has_end=state == "e")
        )
    return RequestId(request_id), Told(tuple(places))


def is_request_id(text: str) -> bool:
    """Whether this server could have made it."""
    return _REQUEST_ID.fullmatch(text) is not None
