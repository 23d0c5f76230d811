"""The scheduler's mind: one event in, commands out. No clock, no dice, no IO.

The same events always give the same commands (law 7); so the real loop, the tests and a simulator
can drive the same machine. Gateways are answered in desk.py; this file is time and the executor.
"""

from itertools import count

from services.scheduler.core.beams import Beams
from services.scheduler.core.book import Book
from services.scheduler.core.commands import Command, RunStep
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.desk import Desk
from services.scheduler.core.detached import Detached
from services.scheduler.core.endings import Endings
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    DetachRequested,
    Event,
    ExecutorJoined,
    ExecutorLost,
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
from services.scheduler.core.flight import SentRow
from services.scheduler.core.growth import Growth
from services.scheduler.core.intake import Limits
from services.scheduler.core.kv.usage import KVUsage
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.pin_desk import PinDesk
from services.scheduler.core.policies.order import ORDERS
from services.scheduler.core.queue_limits import QueueLimits
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish, Sequence
from services.scheduler.core.steps import MakeAllocator, Steps, paged
from services.scheduler.core.streams import Outbox, Streams
from shared.errors import InvariantBroken
from shared.ids import SequenceId
from shared.messages import ExecutorReady, StepFailed, StepResult

__all__ = ["Scheduler", "SchedulerConfig"]

MOST_LOSSES = 3  # a request in this many lost plans in a row is taken for their cause


class Scheduler:
    """Waiting and running requests, their blocks, and the plans in flight.

    Read `counters`, the `num_...` gauges and `usage()` for metrics; gauges are derived when asked
    (law 8). `book` and `steps` are for laws.py; change nothing through them.
    """

    def __init__(self, config: SchedulerConfig, make_allocator: MakeAllocator = paged) -> None:
        self.config = config
        self.counters = Counters()
        self.book = Book(ORDERS[config.scheduling_policy]())
        self.steps = Steps(config, self.book, self.counters, make_allocator)
        self._outbox = Outbox()
        streams = Streams(self._outbox, self.counters)
        self._endings = Endings(self.book, self.steps, streams, self.counters)
        self._streams = streams
        queue_limits = QueueLimits(config.max_num_queued_reqs, config.max_num_queued_tokens)
        sequence_ids = map(SequenceId, count(1))
        self._beams = Beams(self.steps, streams, self.counters, sequence_ids)
        self._pin_desk = PinDesk(
            self.book, self.steps, streams, self._outbox, self.counters, config, sequence_ids
        )
        self._detached = Detached(self.book, self._endings, self.counters, config)
        self._desk = Desk(
            self.book,
            self.steps,
            self._endings,
            self._beams,
            streams,
            self._outbox,
            self.counters,
            queue_limits,
            self._detached,
            config.stream_ttl_s,
            num_pinned=lambda: self._pin_desk.num_blocks,
            sequence_ids=sequence_ids,
        )
        self._limits: Limits | None = None

    # ----------------------------------------------------------------- what others read

    @property
    def num_running(self) -> int:
        """Requests that take part in the steps."""
        return sum([not request.is_pin for request in self.book.running])

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks, or for a model to be known."""
        num_waiting = sum([not request.is_pin for request in self.book.waiting])
        return num_waiting + self._desk.num_unchecked

    @property
    def num_queued(self) -> int:
        """Those of the waiting that have yet to take their first step: `max_num_queued_reqs`."""
        return self._desk.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of these: `max_num_queued_tokens`."""
        return self._desk.num_queued_tokens

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in the CPU pool."""
        return len(self.book.line(Status.SWAPPED))

    @property
    def num_pins(self) -> int:
        """Prefixes that are pinned, computed or not."""
        return len(self.book.pins)

    @property
    def num_pinned_blocks(self) -> int:
        """Different blocks that these hold now."""
        tables = [prefix.request.sequences[0].table for prefix in self.book.pins]
        return len({block_id for table in tables if table is not None for block_id in table.row})

    @property
    def num_finished_kept(self) -> int:
        """Finished requests whose log is kept until their gateway is done with them."""
        return len(self.book.finished())

    @property
    def num_detached(self) -> int:
        """Requests whose stream nobody reads now, and somebody may come back for."""
        return sum([request.is_detached for request in self.book])

    @property
    def num_detached_bytes(self) -> int:
        """About how much memory these take."""
        return self._detached.num_bytes

    def longest_wait_s(self, at: float) -> float:
        """Seconds for which somebody has waited, or been swapped out, by now: the most."""
        return self._desk.longest_wait_s(at)

    def usage(self) -> KVUsage:
        """Where the places of the KV pool are."""
        return self.steps.usage()

    def cpu_usage(self) -> KVUsage:
        """Where the places of the pool for swapped blocks are."""
        return self.steps.cpu_usage()

    @property
    def prefix_evictions(self) -> int:
        """Blocks whose known content gave way to something else, so far."""
        return self.steps.num_evictions

    # ----------------------------------------------------------------- the one way in

    def handle(self, event: Event) -> list[Command]:
        """Everything that follows from `event`, in the order to be carried out.

        The next plan comes first: the executor is what everybody waits for. Raises: InvariantBroken
        for a bug of ours; after it this object may not be used.
        """
        self.book.now = event.at
        self._take(event)
        plans: list[Command] = []
        while (sent := self.steps.next_plan()) is not None:
            plans.append(RunStep(sent.plan))
        return plans + self._outbox.drain()

    def _take(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._desk.arrived(event)
            case CancelRequested():
                self._desk.cancelled(event)
            case AttachRequested():
                self._desk.attached(event)
            case DetachRequested():
                self._desk.detached(event)
            case RequestDone():
                self._desk.done(event)
            case StreamsListed():
                self._desk.listed(event)
            case GatewayLost():
                self._desk.lost(event)
            case PinRequested():
                self._pin_desk.pin(event)
            case UnpinRequested():
                self._pin_desk.unpin(event)
            case PinsListed():
                self._pin_desk.list(event)
            case ExecutorJoined(at, ready):
                self._executor_joined(at, ready)
            case ExecutorLost(at):
                self._executor_lost(at)
            case StepFinished(at, result):
                self._step_finished(at, result)
            case StepRefused(at, failed):
                self._step_refused(at, failed)
            case Tick(at):
                self._desk.tick(at)

    # ----------------------------------------------------------------- the executor

    def _executor_joined(self, at: float, ready: ExecutorReady) -> None:
        self._executor_lost(at)  # the one before, if nobody told us that it left
        self._limits = Limits.of(ready, self.config)
        self.steps.join(ready)
        self._pin_desk.opened(self._limits)
        self._desk.opened(self._limits, at)

    def _executor_lost(self, at: float) -> None:
        if not self.steps.is_joined:
            return
        for request in self.steps.lose():
            request.num_losses += 1
            if request.num_losses >= MOST_LOSSES:
                error = f"the executor was lost {MOST_LOSSES} times in a row at this request"
                self._end_all(request, Finish.broken(error), at)

    def _step_finished(self, at: float, result: StepResult) -> None:
        sent = self.steps.land(result.boot, result.step_id)
        if sent is None:
            return
        self.counters.plans_finished += 1
        if self._limits is None:
            raise InvariantBroken("a plan was in flight before any model was known")
        self.steps.learn(sent, result.timings)
        growth = Growth(result, sent, self._limits.vocab_size, self._streams, self.counters)
        due, block_size = self._endings.due, self._limits.block_size
        of_pins: list[SentRow] = []
        endings: list[tuple[Request, Sequence | None, Finish]] = []
        searching: dict[Request, None] = {}
        for row in sent.rows.values():
            request = row.request
            if request.status is Status.FINISHED:
                continue  # it ended while the plan ran; what was drawn is not wanted
            flaw = growth.grow(row)
            if flaw is not None:
                endings.append((request, None, flaw))
                continue
            if row.last // block_size > row.table.num_known:
                self.steps.landed(row)
            if request.is_pin:
                of_pins.append(row)
                continue
            if row.is_report:
                searching[request] = None
            grown = row.draws if request.max_tokens else request.live_answers
            for sequence in grown:
                if sequence.finish is None and (finish := due(request, sequence)):
                    endings.append((request, sequence, finish))
        for request in searching:  # when all rows have landed: their blocks may be forked now
            endings += [(request, *ending) for ending in self._beams.expand(request)]
        for request, ended, finish in endings:  # after all tokens: one message for each gateway
            if ended is None:
                self._end_all(request, finish, at)
            elif ended.finish is None:
                self._endings.end(request, ended, finish, at)
        for row in of_pins:
            self._pin_desk.computed(row)

    def _step_refused(self, at: float, failed: StepFailed) -> None:
        """Nothing of that plan may be relied on, so its requests end; the others live.

        What it was to move, and what the plan after it makes of that, is computed again.
        """
        sent = self.steps.land(failed.boot, failed.step_id)
        if sent is None:
            return
        self.counters.plans_refused += 1
        if not sent.is_doubtful:
            finish = Finish.broken(f"the executor gave up: {failed.message}")
            for request in sent.requests:
                if request.is_live:
                    self._end_all(request, finish, at)
        self.steps.doubt(sent)

    def _end_all(self, request: Request, finish: Finish, at: float) -> None:
        if request.is_pin:
            self._pin_desk.broken(request, finish)
        else:
            self._endings.end_all(request, finish, at)
