"""The executor's side of the mind: its pools, the plans in flight, and who holds which blocks."""

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from services.scheduler.core.book import Book
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.costs import MachineCosts
from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan, SentRow
from services.scheduler.core.giving_way import GivingWay
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.prefix import PrefixCache
from services.scheduler.core.kv.usage import KVUsage
from services.scheduler.core.lifecycle import Change
from services.scheduler.core.planner import Planner
from services.scheduler.core.policies.batching import Mixed
from services.scheduler.core.policies.preemption import (
    Auto,
    LatestFirst,
    Preemption,
    Recompute,
    Swap,
)
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.ids import Boot
from shared.messages import ExecutorReady, StepTimings

MakeAllocator: TypeAlias = Callable[[int, int], Allocator]

_PREEMPTIONS: Final[dict[str, Callable[[], Preemption]]] = {
    "auto": Auto,
    "swap": Swap,
    "recompute": Recompute,
}


def paged(num_blocks: int, block_size: int) -> Allocator:
    """The default allocator over a new pool, every block of it free."""
    return PagedAllocator(BlockPool(num_blocks), block_size)


_NO_POOL: Final = KVUsage(block_size=1, num_blocks=0, num_free=0, num_shared=0, tokens=0)


class Steps:
    """Plans go out, results come in, and a block that a plan in flight uses is not freed."""

    def __init__(
        self,
        config: SchedulerConfig,
        book: Book,
        counters: Counters,
        make_allocator: MakeAllocator = paged,
    ) -> None:
        self._config = config
        self._book = book
        self._counters = counters
        self._make_allocator = make_allocator
        self._planner: Planner | None = None
        self._costs: MachineCosts | None = None
        self._step_id = 0
        self._past_evictions = 0
        self.holdings: Holdings | None = None
        """Of the last executor that joined; all free while there is none."""
        self.in_flight: deque[SentPlan] = deque()

    @property
    def is_joined(self) -> bool:
        """Whether an executor takes plans."""
        return self._planner is not None

    @property
    def oldest(self) -> int | None:
        """The id of the plan in flight whose result is next; None if there is none."""
        return self.in_flight[0].plan.step_id if self.in_flight else None

    def usage(self) -> KVUsage:
        """Where the pool's places are, counted from the block tables now."""
        return self.holdings.allocator.usage() if self.holdings is not None else _NO_POOL

    def cpu_usage(self) -> KVUsage:
        """The same of the pool for swapped blocks."""
        return self.holdings.cpu.usage() if self.holdings is not None else _NO_POOL

    @property
    def num_evictions(self) -> int:
        """Blocks of the prefix cache that were handed out for something else."""
        prefix = self.holdings.prefix if self.holdings is not None else None
        return self._past_evictions + (prefix.evictions if prefix is not None else 0)

    def join(self, ready: ExecutorReady) -> None:
        """An executor with empty pools takes plans from now on."""
        self._past_evictions = self.num_evictions
        if self.holdings is not None and self.holdings.allocator.block_size != ready.block_size:
            for request in self._book.everyone:
                for sequence in request.every_sequence:
                    sequence.hashes = []
        allocator = self._make_allocator(ready.num_gpu_blocks, ready.block_size)
        prefix = None
        if self._config.enable_prefix_caching:
            prefix = PrefixCache(allocator.pool, ready.block_size)
        self._book.pins.restart()
        self.holdings = Holdings(allocator, ready.num_cpu_blocks, prefix, self._book.pins)
        self._costs = MachineCosts(ready.costs, self._counters)
        giving_way = GivingWay(
            book=self._book,
            holdings=self.holdings,
            costs=self._costs,
            victim=LatestFirst(),
            preemption=_PREEMPTIONS[self._config.preemption_mode](),
            counters=self._counters,
        )
        self._planner = Planner(
            boot=self._config.boot,
            book=self._book,
            holdings=self.holdings,
            batching=Mixed(self._config.max_num_batched_tokens),
            giving_way=giving_way,
            counters=self._counters,
            max_running=self._config.most_sequences,
            max_scored_tokens=self._config.max_scored_tokens,
            watermark=self._config.watermark,
            keeps_bills=self._config.enable_kv_bill,
        )

    def lose(self) -> list[Request]:
        """The executor is gone: plans in flight are forgotten, whoever ran waits for recompute.

        Both pools are gone with it, so that is true of swapped requests too. Returns: the live
        requests of the lost plans, each once, in the order of their rows.
        """
        lost = {
            request: None for sent in self.in_flight for request in sent.requests if request.is_live
        }
        self._counters.executor_losses += 1
        self._counters.plans_lost += len(self.in_flight)
        for sent in self.in_flight:
            _forget_draws(sent)
        self.in_flight.clear()
        for request in (*self._book.running, *self._book.swapped, *self._book.pinned):
            self.drop(request)
        for request in self._book:
            for sequence in request.every_sequence:
                sequence.num_lost = 0  # whoever gave way before would compute it again anyway
        self._settle()
        self._planner = None
        return list(lost)

    def prepare(self, request: Request) -> None:
        """What can be done for a new request before it is planned."""
        if self.holdings is not None:
            self.holdings.known.prepare(request)

    def next_plan(self) -> SentPlan | None:
        """A plan to send now, if one may be sent and there is something to compute."""
        self._settle()
        planner, oldest = self._planner, self.oldest
        if planner is None or len(self.in_flight) >= self._config.plans_in_flight:
            return None
        if oldest is not None and (self.in_flight[-1].is_doubtful or planner.has_suspect):
            return None
        if not (self._book.running or self._book.waiting or self._book.swapped):
            return None
        sent = planner.plan(self._step_id + 1, oldest)
        if sent is not None:
            self._step_id += 1
            self._counters.plans_sent += 1
            self.in_flight.append(sent)
        return sent

    def land(self, boot: Boot, step_id: int) -> SentPlan | None:
        """The plan in flight that this result is of; None for a result nobody waits for (law 3)."""
        if (
            not self.in_flight
            or boot != self._config.boot
            or step_id != self.in_flight[0].plan.step_id
        ):
            self._counters.results_dropped += 1
            return None
        sent = self.in_flight.popleft()
        _forget_draws(sent)
        return sent

    @property
    def expected_s(self) -> float:
        """What the oldest plan in flight should take, in seconds; 0 if there is none."""
        if self._costs is None or not self.in_flight:
            return 0.0
        return self._costs.expected_s(self.in_flight[0])

    def learn(self, sent: SentPlan, timings: StepTimings) -> None:
        """What a plan took: estimates are corrected by it."""
        if self._costs is not None:
            self._costs.learn(sent, timings)

    def landed(self, row: SentRow) -> None:
        """A row was computed: its full blocks can be shared from now on."""
        if self.holdings is not None:
            self.holdings.known.landed(row)

    def doubt(self, refused: SentPlan) -> None:
        """A plan was refused, and nothing that rests on it is worth anything.

        Who was swapped out or in by it, and who has a row in it and was not ended for it, computes
        all again. The plan that was made after it may be refused for what this one did not draw: it
        is doubtful, nothing is planned on top of it, and whoever has a row in it computes all again
        if it is.
        """
        for request in dict.fromkeys(
            (*refused.swapped_out, *refused.swapped_in, *refused.requests)
        ):
            for sent in self.in_flight:
                doubtful = [row for row in sent.rows.values() if row.request is request]
                for row in doubtful:
                    for sequence in row.draws:
                        sequence.ahead -= 1
                    del sent.rows[row.sequence.sequence_id]
            if request.holds_blocks:
                self.drop(request)
        for sent in self.in_flight:
            sent.is_doubtful = True

    def drop(self, request: Request) -> None:
        """A request that holds blocks gives them all up, and waits to compute them again."""
        for sequence in request.live_sequences:
            self.release(sequence)
        request.is_protected = request.is_pin
        self._book.change(request, Change.RECOMPUTE)

    def release(self, sequence: Sequence) -> None:
        """The sequence needs its blocks no more: they are free now, or at its plan's result."""
        if self.holdings is not None:
            self.holdings.release(sequence)

    def branch(self, beam: Sequence, twin: Sequence) -> None:
        """Another beam goes on from where this one is, on the same blocks."""
        if self.holdings is not None:
            self.holdings.branch(beam, twin)

    def _settle(self) -> None:
        if self.holdings is not None:
            self.holdings.settle(self.oldest)


def _forget_draws(sent: SentPlan) -> None:
    """What a plan draws has a place of its own until its result: then it is known, or lost."""
    for row in sent.rows.values():
        for sequence in row.draws:
            sequence.ahead -= 1
