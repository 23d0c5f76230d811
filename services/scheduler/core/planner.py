"""What the next step computes: who goes on, who gives way, who comes back, who starts.

One round of planning walks the running requests in their order, oldest first, and hands out places
for what each may compute. When no block is free the latest running request gives way; its blocks
settle, so nobody gets them in the same round (law 9), and who asked sits this round out. It is only
when everybody went on that swapped requests come back, and only when none is left that waiting ones
start; under priorities precedence.py has a word before. A round in which nobody got anything but
somebody gave way is no plan: the blocks settle and the walk begins again.

Who came back, from the CPU pool or by computing all again, is *protected* until it has a new token:
it gives way to nobody, and the blocks for its known tokens are kept from the growth of others. So
whoever comes back gets further than it was, by a token of one of its sequences at least, and nobody
waits for ever.

A request in whose steps executors died twice in a row is a suspect: it gets steps of its own, while
the others pause, until it has its next token. So innocent ones cost a step each, and a culprit is
found at its third loss.
"""

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.draft import Draft
from services.scheduler.core.flight import SentPlan
from services.scheduler.core.giving_way import GivingWay
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.letting_in import LettingIn
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.policies.batching import Batching
from services.scheduler.core.precedence import Precedence
from services.scheduler.core.request import Request
from services.scheduler.core.rows import Rows
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.ids import Boot


class Planner:
    """Makes plans for one executor life. It alone changes tables while a plan is made."""

    def __init__(
        self,
        *,
        boot: Boot,
        book: Book,
        holdings: Holdings,
        batching: Batching,
        giving_way: GivingWay,
        counters: Counters,
        max_running: int,
        max_scored_tokens: int,
        watermark: float,
        keeps_bills: bool = False,
    ) -> None:
        """At most `max_running` sequences run.

        A start leaves `watermark` of the pool, rounded down, free for those who go on.
        """
        self._boot = boot
        self._book = book
        self._holdings = holdings
        self._pool = holdings.allocator.pool
        self._batching = batching
        self._giving_way = giving_way
        self._counters = counters
        self._rows = Rows(holdings, counters)
        self._max_scored_tokens = max_scored_tokens
        self._told_before = 0
        self._keeps_bills = keeps_bills
        watermark_blocks = int(watermark * self._pool.num_blocks)
        self._precedence = Precedence(
            book=book,
            holdings=holdings,
            giving_way=giving_way,
            max_running=max_running,
            watermark_blocks=watermark_blocks,
        )
        self._letting_in = LettingIn(
            book=book,
            holdings=holdings,
            giving_way=giving_way,
            precedence=self._precedence,
            rows=self._rows,
            counters=counters,
            max_running=max_running,
            watermark_blocks=watermark_blocks,
        )

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect runs or is next: its steps are sent one by one."""
        waiting = self._book.waiting
        return any(request.is_suspect for request in self._book.running) or (
            len(waiting) > 0 and waiting.first.is_suspect
        )

    def plan(self, step_id: int, oldest: int | None = None) -> SentPlan | None:
        """The next plan, or None when nobody can go on.

        `oldest` is the first plan in flight; what it and later ones name is not handed out.
        """
        before_step = step_id if oldest is None else oldest
        self._holdings.settle(before_step)
        self._told_before = self._giving_way.num_told
        while True:
            before = self._giving_way.num_told
            draft = self._walk(step_id, is_idle=oldest is None)
            self._holdings.settle(before_step)
            if not draft.is_empty or self._giving_way.num_told == before:
                break
            if not self._book.running:  # all made way for who is next
                self._told_before = self._giving_way.num_told
        if draft.is_empty:
            return None
        several = [row.request for row in draft.sent.values() if len(row.request.sequences) > 1]
        for request in dict.fromkeys(several):
            self._holdings.share_prompt(request)
        self._count(draft)
        if self._keeps_bills:
            for request in dict.fromkeys([row.request for row in draft.sent.values()]):
                if request.bill is not None:
                    request.bill.step(request.live_sequences)
        return draft.seal(self._boot, self._giving_way.take_told())

    def _count(self, draft: Draft) -> None:
        self._counters.cow_copies += len(draft.copies)
        self._counters.swap_out_blocks += len(draft.swap_out)
        self._counters.swap_in_blocks += len(draft.swap_in)

    def _walk(self, step_id: int, *, is_idle: bool) -> Draft:
        running = [(request, request.live_sequences) for request in self._book.running]
        going_on = running
        suspects = [pair for pair in running if pair[0].num_losses and pair[0].is_suspect]
        if suspects:
            going_on = suspects[:1]
        elif self._is_suspect_next():
            going_on = []
        asking = [(request, _asking(sequences)) for request, sequences in going_on]
        draft = Draft(
            step_id,
            self._batching.open([wanted for _, asked in asking for _, wanted in asked]),
            self._max_scored_tokens,
            num_running=sum([len(sequences) + r.num_spare_seats for r, sequences in running]),
            reserved=sum([self._holdings.to_come(r) for r, _ in running if r.is_protected]),
        )
        if not suspects:
            self._precedence.make_way(draft)
        urgent = self._precedence.urgent if going_on else None
        if urgent is None:
            self._walk_those(draft, asking, is_idle)
        else:  # whoever has a greater number comes last in the line of those who run
            split = sum([request.priority <= urgent.priority for request, _ in asking])
            self._walk_those(draft, asking[:split], is_idle)
            is_let_in = not suspects and not self._has_somebody_given_way
            kept = self._precedence.tokens_to_keep(draft) if is_let_in else 0
            draft.shares.left -= kept
            self._walk_those(draft, asking[split:], is_idle)
            draft.shares.left += kept
        if not suspects and not self._has_somebody_given_way:
            self._letting_in.let_in(draft, is_idle)
        return draft

    def _walk_those(
        self, draft: Draft, asking: list[tuple[Request, list[tuple[Sequence, int]]]], is_idle: bool
    ) -> None:
        grant, place = draft.shares.grant, self._rows.place
        for request, asked in asking:
            if request.status is not Status.RUNNING:
                continue  # it gave way to one before it
            if len(asked) > 1 or request.num_unscored:
                self._go_on(draft, request, asked, is_idle)
                continue
            for sequence, wanted in asked:  # nearly always: one sequence, one token
                granted = grant(wanted)
                if granted and not place(draft, request, sequence, granted):
                    draft.shares.give_back(granted)
                    self._make_room(draft, request, 1, is_idle)

    @property
    def _has_somebody_given_way(self) -> bool:
        """In this round of planning: then nobody comes back or starts in it."""
        return self._giving_way.num_told > self._told_before

    # ----------------------------------------------------------------- those who run

    def _go_on(
        self, draft: Draft, request: Request, asked: list[tuple[Sequence, int]], is_idle: bool
    ) -> None:
        """Places for what each sequence may compute: for all of them, or none if room is short.

        Requests come oldest first, so whoever gives way comes later and has no row yet.
        """
        granted = [self._grant(draft, request, sequence, wanted) for sequence, wanted in asked]
        if not any(granted):
            return
        if len(asked) > 1:
            need = self._holdings.to_grow(
                [(one.table, num) for (one, _), num in zip(asked, granted, strict=True) if num]
            )
            room = self._rows.room(draft, request)
            if need > room:
                draft.shares.give_back(sum(granted))
                self._make_room(draft, request, need - room, is_idle)
                return
        for (sequence, _), num_places in zip(asked, granted, strict=True):
            if num_places and not self._rows.place(draft, request, sequence, num_places):
                draft.shares.give_back(num_places)
                self._make_room(draft, request, 1, is_idle)
                return

    def _grant(self, draft: Draft, request: Request, sequence: Sequence, wanted: int) -> int:
        granted = draft.shares.grant(wanted)
        if request.num_unscored:
            granted = self._rows.scorable(draft, request, sequence, granted)
        return granted

    def _make_room(self, draft: Draft, asker: Request, lack: int, is_idle: bool) -> None:
        """See to it that blocks come free; the asker sits this round out.

        A block that settles is kept for one asker only. Raises: InvariantBroken if one who is alone
        finds no block: `is_idle` says that none will come from a plan in flight.
        """
        while self._pool.num_settling < draft.owed + lack:
            victim = self._giving_way.victim_for(asker)
            if victim is None or (victim is asker and len(self._book.running) == 1):
                if is_idle and len(self._book.running) == 1 and not self._pool.num_settling:
                    raise InvariantBroken(
                        f"{asker.request_id} runs alone and finds no block: {self._pool.num_blocks}"
                        f" in all, {self._pool.num_available} free"
                    )
                return
            self._giving_way.give_way(draft, victim)
            if victim is asker:
                return
        draft.owed += lack

    def _is_suspect_next(self) -> bool:
        """Whether everybody else pauses because a suspect can start now."""
        book = self._book
        if self._has_somebody_given_way or self._precedence.is_swapped_next or not book.waiting:
            return False
        request = book.waiting.first
        if not request.is_suspect:
            return False
        return self._letting_in.can_start(request)


def _asking(sequences: tuple[Sequence, ...]) -> list[tuple[Sequence, int]]:
    """Those that hold tables, and how many tokens each could compute now."""
    if len(sequences) == 1:
        return [(sequences[0], sequences[0].num_to_compute)]
    return [(one, one.num_to_compute) for one in sequences if one.table is not None]
