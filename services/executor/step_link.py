"""The step link to the scheduler, in a thread of its own, so that no forward pass silences it."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, TypeAlias

import uvloop

from services.executor.adoption import Adoption
from shared.curve import ClientKeys
from shared.guard import LOADING_S, STANDSTILL_S, Guard
from shared.ids import Boot
from shared.links import Dealer
from shared.liveness import HEARTBEAT_S
from shared.logs import get_logger
from shared.messages import (
    TO_EXECUTOR,
    Adopt,
    Drain,
    ExecutorReady,
    Heartbeat,
    StepCommand,
    StepFailed,
    StepPlan,
    StepResult,
)
from shared.metrics import MESSAGES_DROPPED, serve_metrics

_MOST_WAITING: Final = 16
"""Plans that may wait for the interpreter; the protocol has two in flight at most."""

_log = get_logger("step_link")


@dataclass(frozen=True, slots=True)
class Run:
    """Carry out a plan of the given adoption."""

    adoption: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class StartOver:
    """A scheduler took us that knows nothing of us."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish; because of `error`, if there is one."""

    error: BaseException | None = None


Errand: TypeAlias = Run | StartOver | Stop


class StepLink:
    """Heartbeats, adoption, plans in, results out. Its methods are for other threads.

    Args:
        endpoint: where the scheduler listens.
        boot: this process life.
        errands: where plans and news go, in the order they came.
        metrics_address: serve /metrics there, if given.
        keys: CURVE keys, if the scheduler has any.
        guard: who ends this process if it stands still, if anybody; beaten to with every heartbeat.
    """

    def __init__(
        self,
        endpoint: str,
        boot: Boot,
        errands: "SimpleQueue[Errand]",
        metrics_address: tuple[str, int] | None = None,
        keys: ClientKeys | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._boot = boot
        self._errands = errands
        self._metrics_address = metrics_address
        self._keys = keys
        self._guard = guard
        self._is_draining = False
        self._phase = "starting"
        self._ready: ExecutorReady | None = None
        self._adoption = Adoption(checked_at=time.monotonic())
        self._started: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="step-link", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._dealer: Dealer[StepCommand]

    def start(self) -> None:
        """Begin to send heartbeats. Raises: StartError if the metrics port is taken."""
        self._thread.start()
        error = self._started.get()
        if error is not None:
            raise error

    def say(self, phase: str) -> None:
        """What the heartbeats tell from now on."""
        self._phase = phase

    def announce(self, ready: ExecutorReady) -> None:
        """The model is loaded: offer it until a scheduler takes it."""

        def offer() -> None:
            self._phase = ""
            self._ready = ready
            self._dealer.send(ready)

        self._call(offer)

    def is_current(self, adoption: int) -> bool:
        """Whether somebody still waits for work of this adoption."""
        return adoption == self._adoption.number

    def send(self, adoption: int, result: StepResult | StepFailed) -> None:
        """Send a plan's result, if the scheduler it came from is still ours."""
        self._call(lambda: self._send_result(adoption, result))

    def stop(self) -> None:
        """Send what is on its way and end the thread."""
        if self._thread.is_alive():
            self._call(lambda: self._stopping.set())
            self._thread.join()

    # ------------------------------------------------------------- inside the thread

    def _call(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it ended by an error: a `Stop` says so
            self._loop.call_soon_threadsafe(job)

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - the main thread ends with it
            self._started.put(error)
            self._errands.put(Stop(error))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        address = self._metrics_address
        page = await serve_metrics(address) if address else None
        identity = f"executor-{self._boot:016x}".encode()
        self._dealer = Dealer[StepCommand](
            "step", self._endpoint, TO_EXECUTOR, identity, "--step-endpoint", self._keys
        )
        try:
            with self._dealer:
                self._started.put(None)
                tasks = [
                    asyncio.create_task(part())
                    for part in (self._receive, self._beat, self._stopping.wait)
                ]
                done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
                for task in done:
                    task.result()  # raises what ended it
        finally:
            if page is not None:
                await page.cleanup()

    async def _beat(self) -> None:
        while True:
            why = self._adoption.check(time.monotonic())
            if why:
                self._tell_lost(why)
            self._dealer.send(Heartbeat(self._boot, self._phase))
            is_free = self._adoption.scheduler is None and not self._is_draining
            if self._ready is not None and is_free:
                self._dealer.send(self._ready)
            if self._guard is not None and not self._is_draining:
                self._guard.beat(LOADING_S if self._ready is None else STANDSTILL_S)
            await asyncio.sleep(HEARTBEAT_S)

    async def _receive(self) -> None:
        while True:
            message = await self._dealer.receive()
            now = time.monotonic()
            match message:
                case Heartbeat():
                    why = self._adoption.hear(message, now)
                    if why:
                        self._tell_lost(why)
                case Adopt(scheduler_boot) if self._ready is not None:
                    if self._adoption.adopt(scheduler_boot, now):
                        _log.info("adopted", scheduler=f"{scheduler_boot:016x}")
                        self._errands.put(StartOver())
                case StepPlan():
                    self._take(message)
                case Drain():
                    self._drain()

    def _drain(self) -> None:
        """End, as soon as the main thread can; if it hangs in a step, the guard ends it."""
        if not self._is_draining:
            self._is_draining = True  # from now on no beat
            _log.warning("draining", why="told by the scheduler", killed_after_s=STANDSTILL_S)
            self._errands.put(Stop())

    def _take(self, plan: StepPlan) -> None:
        if plan.boot != self._adoption.scheduler:
            MESSAGES_DROPPED.labels(link="step", reason="stale").inc()
            _log.warning("plan_dropped", step_id=plan.step_id, why="of another scheduler boot")
        elif self._errands.qsize() >= _MOST_WAITING:
            reason = f"{_MOST_WAITING} plans wait already; the protocol has two in flight at most"
            self._send_result(self._adoption.number, StepFailed(plan.boot, plan.step_id, reason))
        else:
            self._errands.put(Run(self._adoption.number, plan))

    def _send_result(self, adoption: int, result: StepResult | StepFailed) -> None:
        if not self.is_current(adoption):
            _log.info("result_dropped", step_id=result.step_id, why="its scheduler is gone")
        elif not self._dealer.send(result):
            # A result that is lost is awaited for ever: let the scheduler begin again with us.
            self._tell_lost(self._adoption.lose("the scheduler took no result"))

    def _tell_lost(self, why: str) -> None:
        _log.warning("scheduler_lost", why=why)
