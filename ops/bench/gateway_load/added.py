"""How much later than its step's end a token comes to its reader."""

import asyncio
import bisect
import contextlib
import time

from services.gateway.link import SchedulerLink
from shared.ids import RequestId
from shared.messages import Submit
from shared.sampling import DrawParams, SamplingParams


class Tap:
    """A request of our own at the scheduler, which runs in every step: tells when steps end."""

    def __init__(self, endpoint: str, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._link = SchedulerLink(endpoint, "toy", 258)
        self._running = asyncio.create_task(self._link.run())
        self.times: list[float] = []

    async def begin(self) -> None:
        """Submit it."""
        while not self._link.scheduler.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        draw = DrawParams(temperature=0.0)
        sampling = SamplingParams(draw, max_tokens=self._max_tokens, ignore_eos=True)
        submit = Submit(RequestId("cmpl-tap"), tuple(b"tap"), sampling)
        self._stream = self._link.submit(submit, self._on_news)

    def _on_news(self) -> None:
        now = time.monotonic()
        (length,) = self._stream.position.positions
        self.times += [now] * (length - len(self.times))

    async def end(self) -> None:
        """Cancel it."""
        self._link.release(self._stream)
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self._link.close()


def added_ms(steps: list[float], notes: list[list[tuple[int, float]]]) -> list[float]:
    """Of each token noted, how long after the end of its step it came, in milliseconds.

    A stream's n-th token is of step n + c. Tokens that come before the next step ends show c, later
    ones a greater number; and who tells us when steps end may be later than the readers himself, by
    a quarter of a step at most times. So c is taken to be what a tenth of the tokens are below, and
    what seems to have come before its step has come at once.
    """
    found = []
    slack_s = (steps[-1] - steps[0]) / len(steps) / 4 if steps else 0.0
    for stream in filter(None, notes):
        offsets = sorted(bisect.bisect_right(steps, at + slack_s) - count for count, at in stream)
        offset = offsets[len(offsets) // 10]
        found += [
            max(0.0, at - steps[count + offset - 1]) * 1e3
            for count, at in stream
            if 0 < count + offset <= len(steps)
        ]
    return sorted(found)
