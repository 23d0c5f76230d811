"""The scheduler's end of the step link, as a test plays it: the real protocol, no mind."""

import asyncio
import contextlib

from shared.ids import Boot
from shared.links import Router
from shared.messages import FROM_EXECUTOR, Adopt, ExecutorReady, Heartbeat, StepFailed, StepResult

ANSWERS_WITHIN_S = 30


class SchedulerSide:
    """Listens, adopts, sends plans, and keeps the newest of what came by kind."""

    def __init__(self, endpoint, boot=7):
        self.boot = Boot(boot)
        self.router = Router("step", endpoint, FROM_EXECUTOR)
        self.peer = None
        self.heard = asyncio.Condition()
        self.ready = []
        self.results = []
        self.phases = []
        self.is_beating = True

    async def __aenter__(self):
        self.tasks = [asyncio.create_task(part()) for part in (self._listen, self._beat)]
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.router.close()

    async def _listen(self):
        while True:
            self.peer, message = await self.router.receive()
            async with self.heard:
                match message:
                    case Heartbeat(phase=phase):
                        self.phases.append(phase)
                    case ExecutorReady():
                        self.ready.append(message)
                    case StepResult() | StepFailed():
                        self.results.append(message)
                self.heard.notify_all()

    async def _beat(self):
        while True:
            if self.peer and self.is_beating:
                self.send(Heartbeat(self.boot))
            await asyncio.sleep(0.1)

    def send(self, message):
        """To the executor that spoke last."""
        assert self.router.send(self.peer, message)

    async def until(self, holds, what):
        """Wait until `holds()`, asked after each message."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERS_WITHIN_S), self.heard:
                await self.heard.wait_for(holds)
                return
        raise AssertionError(f"not within {ANSWERS_WITHIN_S} s: {what}")

    async def adopt(self, boot=None):
        """Wait for an offer of the executor and take it; returns the offer."""
        known = len(self.ready)
        await self.until(lambda: len(self.ready) > known, "an ExecutorReady")
        self.boot = Boot(self.boot if boot is None else boot)
        self.send(Adopt(self.boot))
        return self.ready[-1]

    async def run(self, *plans):
        """Send plans at once; returns their results, in the order they came."""
        known = len(self.results)
        for plan in plans:
            self.send(plan)
        await self.until(lambda: len(self.results) >= known + len(plans), f"{len(plans)} results")
        return self.results[known:]
