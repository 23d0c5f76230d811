"""How long the queue may get, and when it is worth coming back to a full one."""

from typing import Final, NamedTuple

WINDOW_S: Final = 10.0
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 60.0


class _Mark(NamedTuple):
    """Totals at one moment."""

    at: float
    num_dequeued: int
    num_refused: int


class QueueLimits:
    """Refuses what is too much, and measures how fast the queue has drained lately.

    Lately is the last 10 to 20 seconds: since the mark before the newest; a new one is made every
    10 s.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_refused = 0
        self._since: _Mark | None = None
        self._newest: _Mark | None = None

    def tick(self, at: float, num_dequeued: int) -> None:
        """Time passes; `num_dequeued` requests have left the queue so far."""
        if self._newest is None or at - self._newest.at >= WINDOW_S:
            self._since = self._newest
            self._newest = _Mark(at, num_dequeued, self._num_refused)

    def refusal(self, num_queued: int, num_queued_tokens: int, num_tokens: int) -> str:
        """Why a prompt of `num_tokens` may not join a queue so long; "" if it may.

        An empty queue takes any prompt: one that is over the limit alone could never run else.
        """
        if num_queued >= self._max_requests:
            return (
                f"the queue is full: {num_queued} requests wait, at most {self._max_requests} may "
                "(--max-num-queued-reqs); try again later"
            )
        if num_queued and num_queued_tokens + num_tokens > self._max_tokens:
            return (
                f"the queue is full: {num_queued_tokens} prompt tokens wait and this prompt has "
                f"{num_tokens}, at most {self._max_tokens} may (--max-num-queued-tokens); try "
                "again later"
            )
        return ""

    def retry_after_s(self, at: float, num_dequeued: int) -> float:
        """When a place may be had by the one refused now, from 1 to 60 seconds.

        That is when as many have left as were refused lately, this one included, at the speed at
        which they left lately. If none did, the next is taken to need as long again.
        """
        self._num_refused += 1
        since = self._since or self._newest or _Mark(at, num_dequeued, 0)
        num_left = max(1, num_dequeued - since.num_dequeued)
        num_before = self._num_refused - since.num_refused
        seconds = num_before * (at - since.at) / num_left
        return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)
