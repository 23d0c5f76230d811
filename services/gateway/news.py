"""What wakes the one reader of an answer: something came, or it is time for something else."""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_NEAR_S: Final = 0.001  # the event loop's clock counts milliseconds

_T = TypeVar("_T")


class News:
    """An event for one waiter that may also wait for a time.

    News come some thousand times a second and times hardly ever: so one timer serves many waits.
    It is set for the first of their times, and looks again whether that still holds when it rings.
    """

    def __init__(self) -> None:
        self._have_come = False
        self._waiter: asyncio.Future[None] | None = None
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def come(self) -> None:
        """Wake the waiter, now or at its next wait."""
        self._have_come = True
        self._wake()

    async def wait(self, until: float) -> bool:
        """Whether something came by then (monotonic seconds; infinity: for ever). It is taken."""
        if not self._have_come:
            self._until = until
            if until < self._rings_at:
                self._set_timer(until)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        have_come, self._have_come = self._have_come, False
        return have_come

    def close(self) -> None:
        """Nobody waits any more."""
        self._stop_timer()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, at: float) -> None:
        self._stop_timer()
        self._rings_at = at
        delay_s = max(0.0, at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rings_at = math.inf

    def _ring(self) -> None:
        self._timer, self._rings_at = None, math.inf
        if self._waiter is None:
            return  # its reader works; the next wait sets its own
        if self._until - time.monotonic() < _NEAR_S:
            self._wake()
        else:
            self._set_timer(self._until)


async def woken_alone(reading: Coroutine[Any, Any, _T]) -> _T:
    """Its outcome. It is a task of its own, so that news wake it and not all that await us with it.

    Those are a dozen, aiohttp's and the middlewares': an eighth of what a token costs.
    """
    task = asyncio.create_task(reading)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is looked at
    return await task
