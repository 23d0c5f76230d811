"""The requests of one answer, one a prompt, read as one stream."""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.gateway.answer_stream import AnswerStream, Piece
from services.gateway.link import SchedulerLink
from services.gateway.news import News
from shared.errors import ErrorCode
from shared.messages import Refused, Submit

_PIECES_A_TURN: Final = 64  # some milliseconds of writing events
_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A client's `deadline_s`, counted since its request had arrived (monotonic seconds)."""

    arrived_at: float
    deadline_s: float

    @property
    def at(self) -> float:
        """When it passes."""
        return self.arrived_at + self.deadline_s


class StreamRefused(Exception):
    """Request `number` of the answer ended without one; `refused` says why."""

    def __init__(self, refused: Refused, number: int) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.number = number


class AnswerGroup:
    """Whatever is new of any of the requests, at each turn of the one reader.

    A turn costs as much as there is news, however many requests are open, and takes that of a
    bounded number of them, so that others of this gateway have theirs. Requests are taken in the
    order in which their news came, each whole.

    At its deadline it is the scheduler that ends a request. One that is not heard, or says nothing
    for a moment, does not: then who waits here does.
    """

    def __init__(self, link: SchedulerLink, deadline: Deadline | None = None) -> None:
        self._link = link
        self._deadline = deadline
        self._streams: list[AnswerStream] = []
        self._fresh: dict[int, None] = {}
        self._unaccepted: set[int] = set()
        self._refused: StreamRefused | None = None
        self._news = News()

    @property
    def streams(self) -> Sequence[AnswerStream]:
        """One a prompt, in their order."""
        return self._streams

    @property
    def has_moved(self) -> bool:
        """Whether somebody else has begun to take the answer over; of several requests, any."""
        refusals = [stream.refusal for stream in self._streams]
        return any(one is not None and one.code is ErrorCode.MOVED for one in refusals)

    def submit(self, submit: Submit) -> None:
        """Send one more request. Raises: WireError if it has no wire form."""
        number = len(self._streams)
        stream = self._link.submit(submit, partial(self._on_news, number))
        self._streams.append(stream)
        self._unaccepted.add(number)
        if stream.is_refused:
            self._on_news(number)

    def adopt(self, stream: AnswerStream) -> None:
        """One more request, which was taken over: all that has come of it is news."""
        number = len(self._streams)
        self._streams.append(stream)
        stream.on_news = partial(self._on_news, number)
        self._on_news(number)

    async def wait_accepted(self, timeout_s: float) -> bool:
        """Whether the scheduler has taken all requests; False if it said too little in time.

        Raises: StreamRefused.
        """
        until = time.monotonic() + timeout_s
        while self._unaccepted:
            if not await self._some(until):
                return False
        if self._refused is not None:
            raise self._refused
        return True

    async def wait_settled(self, timeout_s: float) -> bool:
        """Whether it is known in time what was cached, and what each request cost."""
        until = time.monotonic() + timeout_s
        while not all(stream.is_settled for stream in self._streams):
            if not await self._news.wait(until):
                return False
        return True

    async def next(self, until: float = math.inf) -> list[tuple[int, Piece]]:
        """What is new, with the number of its request; none if nothing came by then (monotonic s).

        Raises: StreamRefused after all that came before it.
        """
        if self._fresh:
            await asyncio.sleep(0)  # the turn of others
        while not (pieces := self._take(_PIECES_A_TURN)):
            if not await self._some(until):
                return []
        return pieces

    def close(self) -> None:
        """Nobody reads any more."""
        self._news.close()

    def rest(self) -> list[tuple[int, Piece]]:
        """All that is here and not read yet; for an answer that ends with an error."""
        return self._take(math.inf)

    def _take(self, most: float) -> list[tuple[int, Piece]]:
        pieces: list[tuple[int, Piece]] = []
        while self._fresh and len(pieces) < most:
            number = next(iter(self._fresh))
            del self._fresh[number]
            pieces += [(number, piece) for piece in self._streams[number].take()]
        return pieces

    def _some(self, until: float) -> Awaitable[bool]:
        """Whether there may be something new; False if it is `until`. Raises: StreamRefused."""
        if self._refused is not None:
            raise self._refused
        return self._news.wait(until) if self._deadline is None else self._in_time(until)

    async def _in_time(self, until: float) -> bool:
        if not await self._news.wait(min(until, self._gives_up_at)):
            self._give_up()
            return time.monotonic() < until
        return True

    @property
    def _gives_up_at(self) -> float:
        """When to wait for the scheduler's word no longer (monotonic seconds)."""
        if self._deadline is None:
            return math.inf
        return self._deadline.at + (_GRACE_S if self._link.scheduler.is_heard else 0.0)

    def _give_up(self) -> None:
        """The deadline has passed, unless the scheduler was lost or came back meanwhile."""
        if self._deadline is None or time.monotonic() < self._gives_up_at:
            return
        waits_for = self._link.scheduler.phase or "its tokens"
        why = f"deadline_s of {self._deadline.deadline_s:g} s passed ({waits_for})"
        for stream in self._streams:
            self._link.give_up(stream, ErrorCode.DEADLINE, why)

    def _on_news(self, number: int) -> None:
        stream = self._streams[number]
        if stream.is_accepted:
            self._unaccepted.discard(number)
        if stream.refusal is not None and self._refused is None:
            self._refused = StreamRefused(stream.refusal, number)
        self._fresh[number] = None
        self._news.come()
