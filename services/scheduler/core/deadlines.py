"""Requests whose deadline has passed: they end with an error of their own, never with "length".

A deadline counts from the client's asking, `arrival`; so a request that comes again after a restart
keeps it. One that waits for a model to be known is refused.
"""

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.endings import Endings
from services.scheduler.core.events import RequestArrived
from services.scheduler.core.lobby import Lobby
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish
from services.scheduler.core.streams import Outbox
from shared.errors import ErrorCode
from shared.messages import Refused


class Deadlines:
    """Ends what is too late."""

    def __init__(
        self, book: Book, lobby: Lobby, endings: Endings, outbox: Outbox, counters: Counters
    ) -> None:
        self._book = book
        self._lobby = lobby
        self._endings = endings
        self._outbox = outbox
        self._counters = counters

    def tick(self, at: float) -> None:
        """Time passes: whoever is late ends now, here or before a model is known."""
        for request in [request for request in self._book if request.expires_at <= at]:
            self.check(request, at)
        self.tick_lobby(at)

    def check(self, request: Request, at: float) -> None:
        """End a request that is late; its blocks are free at once (law 2)."""
        if request.expires_at > at or not request.is_live:
            return
        num_tokens = sum([len(sequence.generated) for sequence in request.sequences])
        story = f"{_passed(request.submit.deadline_s)} after {num_tokens} tokens"
        self._endings.end_all(request, Finish.broken(story, ErrorCode.DEADLINE), at)
        self._counters.deadlines_passed += 1

    def tick_lobby(self, at: float) -> None:
        """Refuse those who came before a model was known and whose deadline has passed."""
        for event in self._lobby.late(at):
            self._refuse(event)

    def _refuse(self, event: RequestArrived) -> None:
        submit = event.submit
        self._lobby.leave(submit.request_id, event.gateway)
        self._counters.deadlines_passed += 1
        self._counters.requests_refused[ErrorCode.DEADLINE] += 1
        story = f"{_passed(submit.deadline_s)} before any model was loaded"
        refused = Refused(submit.request_id, ErrorCode.DEADLINE, story, "deadline_s")
        self._outbox.say(event.gateway, refused)


def _passed(deadline_s: float | None) -> str:
    return f"deadline_s of {deadline_s:g} s passed"
