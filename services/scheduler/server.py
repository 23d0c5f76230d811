"""The scheduler process: sockets on one side, the core on the other.

The shell stamps the time, turns messages into events, and carries out the commands that come back.
It decides nothing about requests; what it does decide is who is there: gateways and the executor
are alive while their heartbeats come.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.scheduler.absurdity import absurdity_of
from services.scheduler.bystanders import Bystanders
from services.scheduler.core.commands import Command, Reply, RunStep
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    DetachRequested,
    Event,
    ExecutorJoined,
    ExecutorLost,
    Gateway,
    GatewayLost,
    PinRequested,
    PinsListed,
    RequestArrived,
    RequestDone,
    StepFinished,
    StepRefused,
    StreamsListed,
    Tick,
    UnpinRequested,
)
from services.scheduler.core.machine import Scheduler
from services.scheduler.core_config import core_config_of
from services.scheduler.overdue import Overdue
from services.scheduler.report import report_every_so_often
from services.scheduler.step_seconds import StepSeconds
from services.scheduler.unsent import Unsent
from shared.errors import InvariantBroken, WireError
from shared.ids import Boot
from shared.links import Router
from shared.liveness import HEARTBEAT_S, SILENCE_S, new_boot
from shared.logs import get_logger
from shared.messages import (
    Activity,
    Adopt,
    Attach,
    Cancel,
    Detach,
    Done,
    Drain,
    ExecutorMessage,
    ExecutorReady,
    GatewayMessage,
    Heartbeat,
    Hello,
    ListPins,
    Pin,
    StepFailed,
    StepPlan,
    StepResult,
    Submit,
    Unpin,
    Welcome,
)
from shared.metrics import count_dropped
from shared.settings import SchedulerSettings

TICK_S: Final = 0.1
LATE_S: Final = 1.0
"""A tick that comes so late tells of this process, not of its peers."""
NO_EXECUTOR: Final = "waiting for an executor"

_log = get_logger("scheduler")


@dataclass
class _Executor:
    """The executor that was adopted."""

    peer: bytes
    ready: ExecutorReady
    adopted_at: float
    heard_at: float


@dataclass
class SchedulerServer:
    """Both links, the core, and who is alive. `clock` is monotonic, in seconds."""

    settings: SchedulerSettings
    requests: Router[GatewayMessage]
    steps: Router[ExecutorMessage]
    clock: Callable[[], float] = time.monotonic
    boot: Boot = field(default_factory=new_boot)
    phase: str = NO_EXECUTOR
    executor: _Executor | None = None
    executors_seen: int = 0
    bystanders: Bystanders = field(default_factory=Bystanders)
    gateways: dict[Gateway, float] = field(default_factory=dict)
    step_seconds: StepSeconds = field(default_factory=StepSeconds)
    unsent: Unsent = field(default_factory=Unsent)

    def __post_init__(self) -> None:
        self.overdue = Overdue(self.settings.step_timeout)
        self.core = Scheduler(core_config_of(self.settings, self.boot))

    @property
    def activity(self) -> Activity:
        """What is going on, for gateways to tell."""
        if not self.core.steps.in_flight:
            return Activity.BUSY if self.core.num_waiting else Activity.IDLE
        standstill_s = self._standstill_s(self.clock())
        is_stalled = self.overdue.is_early(standstill_s, self.core.steps.expected_s)
        return Activity.STALLED if is_stalled else Activity.BUSY

    def _standstill_s(self, now: float) -> float:
        """For how long no step has come back, though one is under way."""
        return now - self.step_seconds.moved_at if self.core.steps.in_flight else 0.0

    async def run(self) -> None:
        """Until cancelled; an error in any part ends all."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive_requests())
            tasks.create_task(self._receive_steps())
            tasks.create_task(self._beat())
            tasks.create_task(self._tick())
            tasks.create_task(report_every_so_often(self.core, self.clock))

    # ----------------------------------------------------------------- the core's commands

    def handle(self, event: Event) -> None:
        """Give the core one event and carry out what it answers.

        A plan too long for a message is refused here, as the executor would refuse it: when it is
        the oldest in flight. Raises: InvariantBroken if the core wants something said to a gateway
        that has no wire form.
        """
        for command in self.core.handle(event):
            self._carry_out(command)
        if refusal := self.unsent.due(self.core.steps.oldest):
            self._step_failed(refusal, self.clock())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Reply(gateway, message):
                try:
                    self.requests.send(gateway, message)  # lost if not taken: a heartbeat mends it
                except WireError as error:
                    raise InvariantBroken(f"{type(message).__name__}: {error}") from error
            case RunStep(plan):
                self._run(plan)

    def _run(self, plan: StepPlan) -> None:
        if self.executor is None:
            return  # lost at the plan before: the core has forgotten this one too
        for preemption in plan.preemptions:
            _log.info(
                "sequence_preempted", sequence=preemption.sequence_id, by=preemption.mode.value
            )
        self.step_seconds.sent(plan.step_id, self.clock())
        try:
            is_taken = self.steps.send(self.executor.peer, plan)
        except WireError as error:
            self.unsent.keep(StepFailed(self.boot, plan.step_id, str(error)))
            return
        if not is_taken:
            self._lose_executor("it took no plan")

    # ----------------------------------------------------------------- request link

    async def _receive_requests(self) -> None:
        while True:
            peer, message = await self.requests.receive()
            self._from_gateway(Gateway(peer), message, self.clock())

    def _from_gateway(self, gateway: Gateway, message: GatewayMessage, now: float) -> None:
        if gateway in self.gateways:
            self.gateways[gateway] = now
        match message:
            case Hello():
                self.gateways[gateway] = now
                self._welcome(gateway)
            case Heartbeat(streams=streams):
                self.requests.send(gateway, Heartbeat(self.boot, self.phase, (), self.activity))
                if gateway in self.gateways:
                    self.handle(StreamsListed(now, gateway, streams))
            case Submit():
                self.handle(RequestArrived(now, gateway, message))
            case Cancel():
                self.handle(CancelRequested(now, gateway, message))
            case Attach():
                self.handle(AttachRequested(now, gateway, message))
            case Detach():
                self.handle(DetachRequested(now, gateway, message))
            case Done(request_id):
                self.handle(RequestDone(now, gateway, request_id))
            case Pin():
                self.handle(PinRequested(now, gateway, message))
            case Unpin():
                self.handle(UnpinRequested(now, gateway, message))
            case ListPins():
                self.handle(PinsListed(now, gateway, message))

    def _welcome(self, gateway: Gateway) -> None:
        if self.executor is None:
            return
        ready = self.executor.ready
        self.requests.send(
            gateway,
            Welcome(
                self.boot,
                ready.model,
                ready.shape,
                ready.block_size,
                ready.max_model_len,
                ready.eos_token_ids,
            ),
        )

    # ----------------------------------------------------------------- step link

    async def _receive_steps(self) -> None:
        while True:
            peer, message = await self.steps.receive()
            self._from_executor(peer, message, self.clock())

    def _from_executor(self, peer: bytes, message: ExecutorMessage, now: float) -> None:
        current = self.executor
        if current is not None and current.peer == peer:
            current.heard_at = now
        elif isinstance(message, StepResult | StepFailed):
            count_dropped("step", WireError("stranger", "not the executor at work"))
            return  # of an executor that was given up
        match message:
            case Heartbeat(phase=phase):
                if current is None:
                    self.phase = phase or NO_EXECUTOR
                    self.steps.send(peer, Heartbeat(self.boot, self.phase))
            case ExecutorReady():
                self._adopt(peer, message, now)
            case StepResult():
                self.step_seconds.returned(message.step_id, message.timings, now)
                self.handle(StepFinished(now, message))
            case StepFailed():
                self._step_failed(message, now)

    def _step_failed(self, failed: StepFailed, now: float) -> None:
        _log.error("step_failed", step_id=failed.step_id, message=failed.message)
        self.step_seconds.refused(failed.step_id, now)
        self.handle(StepRefused(now, failed))

    def _adopt(self, peer: bytes, ready: ExecutorReady, now: float) -> None:
        """Take an executor that is ready, unless another one works already."""
        current = self.executor
        if absurd := absurdity_of(ready):
            count_dropped("step", WireError("absurd", absurd))
            _log.error("executor_refused", why=absurd, boot=ready.boot)
            return
        if self.overdue.is_given_up(ready.boot):
            self.steps.send(peer, Drain())  # it has not heard it yet
            return
        if current is not None and current.peer != peer:
            if self.bystanders.is_news(ready.boot, now):
                _log.warning("executor_ignored", why="another one is at work", boot=ready.boot)
            return
        if current is not None and now - current.adopted_at < 2 * HEARTBEAT_S:
            self.steps.send(peer, Adopt(self.boot))  # our first word has not reached it yet
            return
        if current is not None:
            self._lose_executor("it started over")
        if not self.steps.send(peer, Adopt(self.boot)):
            return
        self.executor = _Executor(peer, ready, adopted_at=now, heard_at=now)
        self.executors_seen += 1
        self.phase = ""
        _log.info(
            "executor_adopted", model=ready.model, blocks=ready.num_gpu_blocks,
            block_size=ready.block_size, max_model_len=ready.max_model_len,
            cpu_blocks=ready.num_cpu_blocks, block_bytes=ready.costs.block_bytes,
            copy_bytes_per_s=round(ready.costs.copy_bytes_per_s),
            prefill_tokens_per_s=round(ready.costs.prefill_tokens_per_s, 1),
        )  # fmt: skip
        self.handle(ExecutorJoined(now, ready))
        for gateway in self.gateways:
            self._welcome(gateway)

    def _lose_executor(self, why: str) -> None:
        if self.executor is None:
            return
        _log.error("executor_lost", why=why)
        self.executor = None
        self.phase = NO_EXECUTOR
        self.step_seconds.lost()
        self.unsent.lost()
        self.handle(ExecutorLost(self.clock()))

    def _give_up(self, executor: _Executor, standstill_s: float) -> None:
        """It lives, maybe, and does not go on: it is to end, and is never taken again.

        Whoever restarts it then brings another one. If it hears nothing, its guard ends it.
        """
        self.overdue.give_up(executor.ready.boot)
        self.steps.send(executor.peer, Drain())
        self._lose_executor(f"no step came back for {standstill_s:.1f} s (--step-timeout)")

    # ----------------------------------------------------------------- time

    async def _beat(self) -> None:
        while True:
            if self.executor is not None:
                self.steps.send(self.executor.peer, Heartbeat(self.boot))
            await asyncio.sleep(HEARTBEAT_S)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(TICK_S)
            late_s = loop.time() - began - TICK_S
            if late_s > LATE_S:
                self._forgive(late_s)
            self._look_around(self.clock())

    def _forgive(self, late_s: float) -> None:
        """This process stood still itself: what its peers said meanwhile is still to be heard."""
        _log.warning("stood_still", late_s=round(late_s, 1))
        self.step_seconds.stood_still(late_s)
        if self.executor is not None:
            self.executor.heard_at += late_s
        for gateway in self.gateways:
            self.gateways[gateway] += late_s

    def _look_around(self, now: float) -> None:
        """Who has gone?"""
        standstill_s = self._standstill_s(now)
        if self.executor is not None:
            if self.overdue.is_over(standstill_s, self.core.steps.expected_s):
                self._give_up(self.executor, standstill_s)
            elif now - self.executor.heard_at > SILENCE_S:
                self._lose_executor(f"silent for {SILENCE_S:.0f} s")
        for gateway, heard_at in list(self.gateways.items()):
            if now - heard_at > SILENCE_S:
                del self.gateways[gateway]
                _log.warning("gateway_lost", silent_s=round(now - heard_at, 1))
                self.handle(GatewayLost(now, gateway))
        self.handle(Tick(now))
