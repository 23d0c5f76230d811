"""JSON in portions, so that no answer holds up the others, however long it is."""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

PORTION: Final = 128  # items; with 20 log-probabilities each some milliseconds of work
_TURN_S: Final = 0.005
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class LongList:
    """A JSON array whose items are made when they are written, so many at a time.

    Items of which one at a time is written may hold such arrays themselves.
    """

    def __init__(self, items: Iterable[Any], at_a_time: int = PORTION) -> None:
        self._items = items
        self._at_a_time = at_a_time

    def portions(self) -> Iterator[str]:
        """Its JSON, once."""
        items = iter(self._items)
        lead = "["
        while some := list(islice(items, self._at_a_time)):
            if self._at_a_time > 1:
                yield lead + dumps(some)[1:-1]
            else:
                yield lead
                yield from portions(some[0])
            lead = ","
        yield "[]" if lead == "[" else "]"


class Turn:
    """A share of the event loop, for work that is done in portions."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The others have just had theirs."""
        self._ends = time.monotonic() + _TURN_S

    @property
    def is_over(self) -> bool:
        """Whether this one has lasted."""
        return time.monotonic() >= self._ends

    async def give(self) -> None:
        """Let the others have theirs, if this one is over."""
        if self.is_over:
            await asyncio.sleep(0)
            self.begin()


def portions(value: Any) -> Iterator[str]:
    """`value` as JSON, in one portion but for a `LongList` in it or in an object in it."""
    if isinstance(value, LongList):
        yield from value.portions()
    elif not is_long(value):
        yield dumps(value)
    else:
        lead = "{"
        for name, part in value.items():
            yield f"{lead}{dumps(name)}:"
            yield from portions(part)
            lead = ","
        yield "}"


def is_long(value: Any) -> bool:
    """Whether there is a `LongList` in it."""
    if isinstance(value, dict):
        return any(map(is_long, value.values()))
    return isinstance(value, LongList)


def dumps(value: Any) -> str:
    """`value` as short as it can be."""
    return _ENCODER.encode(value)
