"""Time that passes only when everybody waits for it."""

import asyncio
import heapq
from itertools import count

_TURNS = 20  # of the event loop: more than any chain of wake-ups between two waits


class VirtualClock:
    def __init__(self):
        self._now_s = 1000.0
        self._sleepers = []
        self._order = count()

    def now_s(self):
        return self._now_s

    async def sleep(self, seconds):
        waker = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), waker))
        await waker

    async def run(self, work):
        """Let `work` end; whenever it only waits, jump to the next time somebody waits for."""
        task = asyncio.ensure_future(work)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            self._now_s, _, waker = heapq.heappop(self._sleepers)
            waker.set_result(None)
