"""How a request gives way: by swap or by recompute, with all its blocks or none."""

from services.scheduler.core.book import Book
from services.scheduler.core.costs import MachineCosts
from services.scheduler.core.counters import Counters
from services.scheduler.core.draft import Draft
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.lifecycle import Change
from services.scheduler.core.policies.preemption import Preemption, Victim
from services.scheduler.core.request import Request
from shared import messages
from shared.messages import Move, PreemptionMode


class GivingWay:
    """Takes blocks away; what it did is told to the executor with the next plan."""

    def __init__(
        self,
        *,
        book: Book,
        holdings: Holdings,
        costs: MachineCosts,
        victim: Victim,
        preemption: Preemption,
        counters: Counters,
    ) -> None:
        self._book = book
        self._holdings = holdings
        self._costs = costs
        self._victim = victim
        self._preemption = preemption
        self._counters = counters
        self._told: list[messages.Preemption] = []

    @property
    def num_told(self) -> int:
        """Sequences that gave way since the last plan."""
        return len(self._told)

    def take_told(self) -> list[messages.Preemption]:
        """Who gave way since the last plan; told once."""
        told, self._told = self._told, []
        return told

    def victim_for(self, asker: Request) -> Request | None:
        """Who gives way now, if anybody does."""
        return self._victim.of(self._book.running, asker)

    def give_way(self, draft: Draft, victim: Request) -> None:
        """Take all blocks of a running request that has no row in this plan."""
        estimate = self._costs.estimate(*self._holdings.price(victim))
        mode = self._preemption.mode(estimate)
        if mode is PreemptionMode.SWAP:
            moves = self._holdings.swap_out(victim, draft.step_id)
            if moves is None:
                mode = PreemptionMode.RECOMPUTE
                self._counters.swap_fallbacks += 1
            else:
                draft.swap_out += moves
                self.moved(victim, moves)
                draft.swapped_out.append(victim)
                self._book.change(victim, Change.SWAP_OUT)
        draft.num_running -= victim.num_seats
        victim.is_protected = False
        if mode is PreemptionMode.RECOMPUTE:
            self._drop(victim, Change.RECOMPUTE)
        for sequence in victim.live_sequences:
            self._told.append(messages.Preemption(sequence.sequence_id, mode))
        self._counters.preemptions[mode] += 1
        if victim.bill is not None:
            victim.bill.gave_way(mode)
        self._counters.preemption_estimated_s[mode] += estimate.of(mode) or 0.0

    def moved(self, request: Request, moves: list[Move]) -> None:
        """Blocks of a request go to the CPU pool, or back: it is billed for their bytes."""
        if request.bill is not None:
            request.bill.swapped_bytes += len(moves) * self._costs.block_bytes

    def drop_swapped(self, request: Request) -> None:
        """A swapped request that cannot come back as it was computes all again."""
        self._drop(request, Change.RECOMPUTE)
        self._counters.swap_fallbacks += 1

    def _drop(self, request: Request, change: Change) -> None:
        for sequence in request.live_sequences:
            table = sequence.table if sequence.table is not None else sequence.swapped
            if table is not None:
                sequence.num_lost = max(sequence.num_lost, table.num_filled)
            self._holdings.release(sequence)
        self._book.change(request, change)
