"""What the next step computes: who goes on, who gives way, who starts.

One round of planning walks the running requests in their order, oldest first, and hands out places
for what each may compute. When no block is free the latest running request gives way; its blocks
settle, so nobody gets them in the same round (law 9), and who asked sits this round out. It is only
when everybody went on that waiting requests start. A round in which nobody got anything but
somebody gave way is no plan: the blocks settle and the walk begins again.

A request in whose steps executors died twice in a row is a suspect: it gets steps of its own, while
the others pause, until it has its next token. So innocent ones cost a step each, and a culprit is
found at its third loss.
"""

from dataclasses import dataclass, field
from typing import Final

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan, SentRow
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.lifecycle import Change, Status
from services.scheduler.core.policies.batching import Batching, Shares
from services.scheduler.core.policies.preemption import Preemption, Victim
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared import messages
from shared.errors import InvariantBroken
from shared.geometry import blocks_in
from shared.ids import Boot, SequenceId
from shared.messages import Move, PreemptionMode, Row, Score, StepPlan

SUSPECT_AFTER_LOSSES: Final = 2


@dataclass(slots=True)
class _Round:
    """What one walk gives. `owed` settling blocks are spoken for by those who sit it out.

    `scores_left` prompt tokens may still be scored, shared out like the token budget: first come,
    first served. It is full in every step, so whoever comes first is never without.
    """

    shares: Shares
    scores_left: int
    decodes: list[Row] = field(default_factory=list)
    prompts: list[Row] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)
    sent: dict[SequenceId, SentRow] = field(default_factory=dict)
    owed: int = 0


class Planner:
    """Makes plans for one executor life. It alone changes tables while a plan is made."""

    def __init__(
        self,
        *,
        boot: Boot,
        book: Book,
        allocator: Allocator,
        batching: Batching,
        victim: Victim,
        preemption: Preemption,
        counters: Counters,
        max_running: int,
        max_scored_tokens: int,
        watermark: float,
    ) -> None:
        """A start leaves `watermark` of the pool, rounded down, free for those who go on."""
        self._boot = boot
        self._book = book
        self._allocator = allocator
        self._batching = batching
        self._victim = victim
        self._preemption = preemption
        self._counters = counters
        self._max_running = max_running
        self._max_scored_tokens = max_scored_tokens
        self._watermark_blocks = int(watermark * allocator.pool.num_blocks)
        self._gave_way: list[messages.Preemption] = []

    def plan(self, step_id: int) -> SentPlan | None:
        """The next plan, or None when nobody can go on."""
        self._allocator.pool.settle()
        while True:
            before = len(self._gave_way)
            draft = self._walk()
            self._allocator.pool.settle()
            if draft.sent or len(self._gave_way) == before:
                break
        if not draft.sent:
            return None
        plan = StepPlan(
            self._boot,
            step_id,
            rows=(*draft.decodes, *draft.prompts),
            preemptions=tuple(self._gave_way),
            copies=tuple(draft.copies),
        )
        self._gave_way.clear()
        return SentPlan(plan, draft.sent)

    def _walk(self) -> _Round:
        running = list(self._book.running)
        suspect = next((r for r in running if r.num_losses >= SUSPECT_AFTER_LOSSES), None)
        if suspect is not None:
            running = [suspect]
        elif self._is_suspect_next():
            running = []
        going_on = [(request, request.live_sequences) for request in running]
        sequences = [sequence for _, live in going_on for sequence in live]
        draft = _Round(self._batching.open(sequences), self._max_scored_tokens)
        self._go_on(draft, going_on)
        if suspect is None and not self._gave_way:
            self._start_waiting(draft)
        return draft

    # ----------------------------------------------------------------- those who run

    def _go_on(self, draft: _Round, going_on: list[tuple[Request, tuple[Sequence, ...]]]) -> None:
        """Oldest first, so whoever gives way comes later in the walk and has no row yet."""
        for request, live_sequences in going_on:
            if request.status is not Status.RUNNING:
                continue  # it gave way to one before it
            for sequence in live_sequences:
                granted = draft.shares.grant(sequence)
                if request.num_unscored:
                    granted = self._scorable(draft, request, sequence, granted)
                placed = self._place(draft, request, sequence, granted) if granted else 0
                if granted and not placed and not self._is_block_coming(draft, request):
                    break

    def _is_block_coming(self, draft: _Round, asker: Request) -> bool:
        """Whether a settling block is kept for `asker`; False if it gave way itself."""
        pool = self._allocator.pool
        while pool.num_settling <= draft.owed:
            victim = self._victim.of(self._book.running)
            if victim is asker and len(self._book.running) == 1:
                raise InvariantBroken(
                    f"{asker.request_id} runs alone and finds no block: {pool.num_blocks} in all, "
                    f"{len(pool.free_blocks)} free"
                )
            self._preempt(victim)
            if victim is asker:
                return False
        draft.owed += 1
        return True

    def _preempt(self, victim: Request) -> None:
        mode = self._preemption.mode(victim)
        if mode is not PreemptionMode.RECOMPUTE:
            raise InvariantBroken(f"preemption by {mode} is not built yet")
        for sequence in victim.live_sequences:
            if sequence.table is not None:
                self._allocator.free(sequence.table)
                sequence.table = None
            self._gave_way.append(messages.Preemption(sequence.sequence_id, mode))
        self._book.change(victim, Change.RECOMPUTE)
        self._counters.preemptions[mode] += 1

    # ----------------------------------------------------------------- those who wait

    def _start_waiting(self, draft: _Round) -> None:
        """First come, first served: the first who does not fit holds up those behind it."""
        promised = self._promised() if self._book.waiting else 0
        while draft.shares.left and self._can_start_next(promised):
            request = self._book.waiting.first
            if _is_suspect(request) and draft.sent:
                return
            if request.num_unscored and not draft.scores_left:
                return
            self._book.change(request, Change.START)
            for sequence in request.live_sequences:
                sequence.table = self._allocator.start()
                granted = draft.shares.grant_new(sequence)
                if request.num_unscored:
                    granted = self._scorable(draft, request, sequence, granted)
                self._place(draft, request, sequence, granted)
                promised += self._blocks_to_come(sequence)
            if _is_suspect(request):
                return

    def _can_start_next(self, promised: int) -> bool:
        """Whether blocks for all tokens of the next in line are free, above the watermark."""
        book = self._book
        if not book.waiting or len(book.running) >= self._max_running:
            return False
        need = sum(map(self._blocks_to_come, book.waiting.first.live_sequences))
        spare = self._watermark_blocks if book.running else 0
        return self._allocator.pool.num_available - promised - need >= spare

    def _is_suspect_next(self) -> bool:
        """Whether everybody else pauses because a suspect can start now."""
        return (
            not self._gave_way
            and bool(self._book.waiting)
            and _is_suspect(self._book.waiting.first)
            and self._can_start_next(self._promised())
        )

    def _promised(self) -> int:
        """Blocks that those who run need for tokens known but not yet placed."""
        return sum(
            self._blocks_to_come(sequence)
            for request in self._book.running
            for sequence in request.live_sequences
        )

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that the known tokens of a sequence need and that it does not have yet."""
        held = len(sequence.table) if sequence.table is not None else 0
        return blocks_in(sequence.num_tokens, self._allocator.block_size) - held

    # ----------------------------------------------------------------- rows

    def _place(self, draft: _Round, request: Request, sequence: Sequence, granted: int) -> int:
        """Places for up to `granted` tokens, and a row that computes them. Returns how many."""
        table = sequence.table
        if table is None:
            raise InvariantBroken(f"{request.request_id} runs without a block table")
        first, num_tokens = table.num_filled, sequence.num_tokens
        num_placed, copies = self._allocator.append(table, granted)
        if not num_placed:
            return 0
        last = first + num_placed
        samples = request.decoding.asks(sequence) if last == num_tokens else ()
        score = self._score(draft, request, first, last) if request.num_unscored else None
        row = Row(
            sequence.sequence_id,
            sequence.token_ids(first, last),
            first,
            tuple(table.block_ids),
            samples,
            score,
        )
        (draft.decodes if first == num_tokens - 1 else draft.prompts).append(row)
        draft.copies += copies
        draft.sent[sequence.sequence_id] = SentRow(request, sequence, bool(samples), score)
        self._counters.computed_tokens += num_placed
        return num_placed

    # ----------------------------------------------------------------- scores of a prompt

    def _scorable(self, draft: _Round, request: Request, sequence: Sequence, granted: int) -> int:
        """As many of the granted tokens as may be scored in this step; the rest is handed back."""
        if request.num_unscored <= draft.scores_left:
            return granted
        first_unscored = len(request.prompt_logprobs)
        allowed = min(granted, first_unscored + draft.scores_left - sequence.num_computed)
        draft.shares.left += granted - allowed
        return allowed

    def _score(self, draft: _Round, request: Request, first: int, last: int) -> Score | None:
        """What to score of the positions first .. last - 1: each tells of the token after it."""
        prompt, num_top = request.submit.prompt, request.submit.sampling.prompt_logprobs
        first = max(first, len(request.prompt_logprobs))
        token_ids = prompt[first + 1 : last + 1]
        if not token_ids or num_top is None:
            return None
        draft.scores_left -= len(token_ids)
        return Score(first, token_ids, num_top)


def _is_suspect(request: Request) -> bool:
    return request.num_losses >= SUSPECT_AFTER_LOSSES
