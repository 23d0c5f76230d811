"""How much the holder of a key may still ask of this gateway."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from services.gateway import failures
from services.gateway.key_file import Limits

_MINUTE_S: Final = 60.0
_SOON_S: Final = 1.0  # when one of several open requests may have ended


class Bucket:
    """So many a minute: it begins full, and what is taken comes back evenly over a minute.

    More may be taken than is there; then it is empty until that has come back.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; what was used stays used."""
        self._left = min(self._filled(now) + per_minute - self._per_minute, per_minute)
        self._per_minute, self._at = per_minute, now

    def take(self, amount: int, now: float) -> None:
        """Whether or not there is so much."""
        self._left, self._at = self._filled(now) - amount, now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is now."""
        missing = min(amount, self._per_minute) - self._filled(now)
        return max(0.0, missing * _MINUTE_S / self._per_minute)

    def _filled(self, now: float) -> float:
        come_back = (now - self._at) * self._per_minute / _MINUTE_S
        return min(self._left + come_back, float(self._per_minute))


class Allowance:
    """One key's. `clock` is monotonic, in seconds."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits = limits
        self._num_open = 0
        self._requests = _bucket(None, limits.requests_per_minute, clock())
        self._tokens = _bucket(None, limits.tokens_per_minute, clock())

    def change(self, limits: Limits) -> None:
        """Other limits from now on; what was used stays used."""
        now = self._clock()
        self._limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    @contextmanager
    def one_request(self, *, is_new: bool = True) -> Iterator[None]:
        """Around a request; one that goes on with an old stream is only one more that is open.

        Raises: Failure 429 naming the limit that is reached.
        """
        most = self._limits.max_concurrent_requests
        if most is not None and self._num_open >= most:
            raise _limited("max_concurrent_requests", f"{most} requests at once", _SOON_S)
        if is_new:
            self._count_request()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def _count_request(self) -> None:
        self._check_tokens()
        if self._requests is not None:
            now = self._clock()
            if wait_s := self._requests.wait_s(1, now):
                per_minute = self._limits.requests_per_minute
                raise _limited("requests_per_minute", f"{per_minute} requests a minute", wait_s)
            self._requests.take(1, now)

    def admit_prompt(self, num_tokens: int) -> None:
        """Count a prompt that is about to be computed.

        Raises: Failure 429 if others have used up the minute's tokens meanwhile.
        """
        self._check_tokens()
        self.spend(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Count tokens that were generated."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def _check_tokens(self) -> None:
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, self._clock())):
            per_minute = self._limits.tokens_per_minute
            raise _limited("tokens_per_minute", f"{per_minute} tokens a minute", wait_s)


def _bucket(before: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if before is None or per_minute is None:
        return None if per_minute is None else Bucket(per_minute, now)
    before.resize(per_minute, now)
    return before


def _limited(limit: str, what: str, wait_s: float) -> failures.Failure:
    return failures.rate_limited(limit, what, math.ceil(wait_s))
