"""What the scheduler is told last of a request that has no reader here any more."""

from collections.abc import Callable, Set

from shared.ids import RequestId
from shared.messages import Cancel, CancelReason, Detach, Done

LastWord = Cancel | Detach | Done


class LastWords:
    """Said by `send` at once, or at the first beat that can.

    Of each request the first one counts: it is the reader's, and what comes later is of tokens that
    were on their way.
    """

    def __init__(self, send: Callable[[LastWord], bool]) -> None:
        self._send = send
        self._unsaid: dict[RequestId, LastWord] = {}
        self._orphans: set[RequestId] = set()

    def say(self, word: LastWord) -> None:
        """Now, or later."""
        self._unsaid.setdefault(word.request_id, word)
        self.are_said_of(word.request_id)

    def are_said_of(self, request_id: RequestId) -> bool:
        """Whether the scheduler has been told, now at the latest; also if there was nothing."""
        word = self._unsaid.get(request_id)
        if word is not None and not self._send(word):
            return False
        self._unsaid.pop(request_id, None)
        return True

    def came_for_nobody(self, request_id: RequestId) -> None:
        """Tokens have come that nobody reads: the next beat ends the request."""
        self._orphans.add(request_id)

    def beat(self, wanted: Set[RequestId]) -> None:
        """Say what is due, and what could not be said before; `wanted` requests have a reader."""
        for request_id in self._orphans - wanted:
            self._unsaid.setdefault(request_id, gone(request_id))
        self._orphans.clear()
        for request_id in list(self._unsaid):
            self.are_said_of(request_id)

    def forget(self) -> None:
        """The scheduler is another one, which never heard of these requests."""
        self._unsaid.clear()
        self._orphans.clear()


def gone(request_id: RequestId) -> Cancel:
    """Nobody reads it, and nobody will."""
    return Cancel(request_id, None, CancelReason.CLIENT_GONE)
