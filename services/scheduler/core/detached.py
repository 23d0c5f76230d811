"""Streams that nobody reads now: their requests go on, and are kept for whoever comes back.

A request is detached when its gateway says so, or is lost. Only one with a context can be attached
to, so others are forgotten. From its detaching, or its end if that comes later, it is kept for the
time to live; one that still runs then is cancelled. What is kept is bounded: the oldest that are
over go first, among them those whose clients were told all.
"""

from typing import Final

from services.scheduler.core.book import Book
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.endings import Endings
from services.scheduler.core.events import Gateway
from services.scheduler.core.request import Request

_REQUEST_BYTES: Final = 4096  # a Request, a Sequence and their Submit, measured
_TOKEN_BYTES: Final = 40  # an int and the list's pointer to it
_PLACE_BYTES: Final = 250  # a PositionLogprobs without its likeliest tokens
_TOP_BYTES: Final = 80  # each of these


class Detached:
    """Keeps within time and memory what has no reader."""

    def __init__(
        self, book: Book, endings: Endings, counters: Counters, config: SchedulerConfig
    ) -> None:
        self._book = book
        self._endings = endings
        self._counters = counters
        self._config = config

    @property
    def num_bytes(self) -> int:
        """About how much memory the logs of all that are detached take."""
        return sum(_bytes_of(request) for request in self._book if request.is_detached)

    def detach(self, request: Request, at: float, *, is_told: bool) -> None:
        """Its gateway has no reader for it any more, and nothing more to say of it."""
        if not request.submit.context:
            self._endings.forget(request, at)
            return
        _let_go(request, at)
        request.gateway = None
        request.is_told = is_told

    def lose(self, gateway: Gateway, at: float) -> None:
        """A gateway is gone, and so are the readers of all its streams; it may come back."""
        for request in self._book.of_gateway(gateway):
            if not request.submit.context:
                self._endings.forget(request, at)
            elif not request.is_detached:
                _let_go(request, at)
                self._counters.streams_orphaned += 1

    def tick(self, at: float) -> None:
        """Forget what was kept for long enough, or is too much."""
        kept = []
        for request in self._book.kept():
            if at - request.last_heard > self._config.stream_ttl_s:
                if request.is_detached and not request.is_told:
                    self._counters.streams_expired += 1
                self._endings.forget(request, at)
            elif request.is_detached:
                kept.append(request)
        if kept:
            self._make_room(kept, at)

    def _make_room(self, kept: list[Request], at: float) -> None:
        num_bytes = sum(map(_bytes_of, kept))
        num_over = len(kept) - self._config.max_detached_streams
        if num_over <= 0 and num_bytes <= self._config.max_detached_bytes:
            return
        kept.sort(key=lambda one: (one.is_live, not one.is_told, one.last_heard))
        for request in kept:
            if num_over <= 0 and num_bytes <= self._config.max_detached_bytes:
                return
            num_over -= 1
            num_bytes -= _bytes_of(request)
            self._counters.streams_evicted += 1
            self._endings.forget(request, at)


def _let_go(request: Request, at: float) -> None:
    request.detached_at = at
    request.is_told = False
    request.last_heard = max(request.last_heard, at)
    request.listed = ()


def _bytes_of(request: Request) -> int:
    """About how much memory it takes; measured once when it is over."""
    if request.kept_bytes:
        return request.kept_bytes
    submit, sampling = request.submit, request.submit.sampling
    num_tokens = len(submit.prompt) + sum(len(one.generated) for one in request.every_sequence)
    num_places = sum(len(one.logprobs) for one in request.every_sequence)
    num_bytes = (
        _REQUEST_BYTES
        + len(submit.context)
        + num_tokens * _TOKEN_BYTES
        + num_places * (_PLACE_BYTES + _TOP_BYTES * (sampling.logprobs or 0))
        + len(request.prompt_logprobs)
        * (_PLACE_BYTES + _TOP_BYTES * (sampling.prompt_logprobs or 0))
    )
    if not request.is_live:
        request.kept_bytes = num_bytes
    return num_bytes
