"""The executor's side of the mind: its pool, the plans in flight, and who holds which blocks."""

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from services.scheduler.core.book import Book
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.usage import KVUsage
from services.scheduler.core.lifecycle import Change
from services.scheduler.core.planner import Planner
from services.scheduler.core.policies.batching import Mixed
from services.scheduler.core.policies.preemption import LatestFirst, Recompute
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.ids import Boot
from shared.messages import ExecutorReady

MakeAllocator: TypeAlias = Callable[[int, int], Allocator]


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
        self._step_id = 0
        self.allocator: Allocator | None = None
        """Of the last executor that joined; all free while there is none."""
        self.in_flight: deque[SentPlan] = deque()

    @property
    def is_joined(self) -> bool:
        """Whether an executor takes plans."""
        return self._planner is not None

    def usage(self) -> KVUsage:
        """Where the pool's places are, counted from the block tables now."""
        return self.allocator.usage() if self.allocator is not None else _NO_POOL

    def join(self, ready: ExecutorReady) -> None:
        """An executor with empty pools takes plans from now on."""
        self.allocator = self._make_allocator(ready.num_gpu_blocks, ready.block_size)
        self._planner = Planner(
            boot=self._config.boot,
            book=self._book,
            allocator=self.allocator,
            batching=Mixed(self._config.max_num_batched_tokens),
            victim=LatestFirst(),
            preemption=Recompute(),
            counters=self._counters,
            max_running=self._config.max_num_seqs,
            max_scored_tokens=self._config.max_scored_tokens,
            watermark=self._config.watermark,
        )

    def lose(self) -> list[Request]:
        """The executor is gone: plans in flight are forgotten, whoever ran waits for recompute.

        Returns: the live requests of the lost plans, in the order of their rows.
        """
        lost = [request for sent in self.in_flight for request in sent.requests if request.is_live]
        self._counters.executor_losses += 1
        self._counters.plans_lost += len(self.in_flight)
        for sent in self.in_flight:
            self._free_orphans(sent)
        self.in_flight.clear()
        for request in list(self._book.running):
            for sequence in request.live_sequences:
                self.release(sequence)
            self._book.change(request, Change.RECOMPUTE)
        if self.allocator is not None:
            self.allocator.pool.settle()
        self._planner = None
        return lost

    def next_plan(self) -> SentPlan | None:
        """A plan to send now, if one may be sent and there is something to compute."""
        if self._planner is None or len(self.in_flight) >= self._config.plans_in_flight:
            return None
        if not self._book.running and not self._book.waiting:
            return None
        sent = self._planner.plan(self._step_id + 1)
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
        self._free_orphans(sent)
        return sent

    def release(self, sequence: Sequence) -> None:
        """The sequence needs its blocks no more: they are free now, or at its plan's result."""
        if sequence.table is None or self.allocator is None:
            return
        for sent in reversed(self.in_flight):
            if sequence.sequence_id in sent.rows:
                sent.orphans.append(sequence.table)
                break
        else:
            self.allocator.free(sequence.table)
        sequence.table = None

    def _free_orphans(self, sent: SentPlan) -> None:
        if self.allocator is not None:
            for table in sent.orphans:
                self.allocator.free(table)
        sent.orphans.clear()
