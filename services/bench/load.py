"""When requests are sent: so many at a time, or as they arrive, or both."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Time, and waiting for it; a test brings its own."""

    def now_s(self) -> float:
        """Seconds; monotonic."""

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""


@dataclass(frozen=True, slots=True)
class Pace:
    """`arrivals_s`: when each request is due, from the start; None for a closed loop.

    `max_concurrency`: most requests at a time; None for no limit. `max_seconds`: no request is sent
    later than that.
    """

    arrivals_s: Sequence[float] | None
    max_concurrency: int | None
    max_seconds: float | None


async def send_all(
    count: int,
    pace: Pace,
    clock: Clock,
    send: Callable[[int, float], Awaitable[None]],
) -> None:
    """Call `send(index, due)` for each of `count` requests and wait for all.

    `due` is in the clock's seconds. In a closed loop each of `max_concurrency` clients sends its
    next request when its last one is answered.
    """
    start_s = clock.now_s()

    def is_over() -> bool:
        return pace.max_seconds is not None and clock.now_s() - start_s > pace.max_seconds

    if pace.arrivals_s is None:
        indices = iter(range(count))

        async def client() -> None:
            for index in indices:
                if is_over():
                    return
                await send(index, clock.now_s())

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(count, pace.max_concurrency or count)):
                clients.create_task(client())
        return

    seats = asyncio.Semaphore(pace.max_concurrency or count)

    async def visit(index: int, due_s: float) -> None:
        async with seats:
            if not is_over():
                await send(index, due_s)

    async with asyncio.TaskGroup() as visits:
        for index, after_s in enumerate(pace.arrivals_s):
            wait_s = start_s + after_s - clock.now_s()
            if wait_s > 0:
                await clock.sleep(wait_s)
            if is_over():
                return
            visits.create_task(visit(index, start_s + after_s))
