"""Rows of a plan: places for tokens, what is drawn after them, what is scored of them."""

from services.scheduler.core.counters import Counters
from services.scheduler.core.draft import Draft
from services.scheduler.core.flight import SentRow
from services.scheduler.core.holdings import Holdings, is_joint
from services.scheduler.core.kv.allocator import Appended
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.messages import Row, Sample, Score


class Rows:
    """Adds rows to a draft."""

    def __init__(self, holdings: Holdings, counters: Counters) -> None:
        self._holdings = holdings
        self._allocator = holdings.allocator
        self._counters = counters

    def room(self, draft: Draft, request: Request) -> int:
        """Blocks this request may take: those kept for others who came back are not for it."""
        room = self._allocator.pool.num_available - draft.reserved
        if request.is_protected:
            room += self._holdings.to_come(request)
        return room

    def place(self, draft: Draft, request: Request, sequence: Sequence, granted: int) -> int:
        """Places for up to `granted` tokens, and a row that computes them. Returns how many."""
        table = sequence.table
        if table is None:
            raise InvariantBroken(f"{request.request_id} runs without a block table")
        first = table.num_filled
        if draft.reserved:
            num_placed, copies = self._append_beside_reserve(draft, request, table, granted)
        else:
            num_placed, copies = self._allocator.append(table, granted, None, draft.step_id)
        if not num_placed:
            return 0
        table.last_step = draft.step_id
        last = first + num_placed
        num_tokens = len(sequence.prompt) + len(sequence.generated) + sequence.ahead
        draws: tuple[Sequence, ...] = ()
        samples: tuple[Sample, ...] = ()
        is_report = False
        if last < num_tokens:
            pass  # there is more of it to come
        elif request.beams:
            samples, is_report = request.decoding.asks(sequence), True
        elif len(request.sequences) == 1:
            samples = request.decoding.asks(sequence)
            if samples:
                draws = request.sequences
        else:
            draws, samples = self._draws(request, sequence)
        score = self._score(draft, request, sequence, first, last) if request.num_unscored else None
        sequence_id, token_ids = sequence.sequence_id, sequence.token_ids(first, last)
        row = Row(sequence_id, token_ids, first, table.row, samples, score)
        (draft.prompts if first < num_tokens - 1 else draft.decodes).append(row)
        if copies:
            draft.copies += copies
            if request.bill is not None:
                request.bill.copied_blocks += len(copies)
        sent = SentRow(request, sequence, table, last, draws, score, is_report)
        draft.sent[sequence_id] = sent
        self._counters.computed_tokens += num_placed
        if sequence.num_lost > first:
            draft.num_again += min(last, sequence.num_lost) - first
        return num_placed

    def _append_beside_reserve(
        self, draft: Draft, request: Request, table: BlockTable, granted: int
    ) -> Appended:
        before = self._holdings.to_come(request) if request.is_protected else 0
        room = self._allocator.pool.num_available - draft.reserved + before
        placed = self._allocator.append(table, granted, max(room, 0), draft.step_id)
        if request.is_protected:
            draft.reserved += self._holdings.to_come(request) - before
        return placed

    def _draws(
        self, request: Request, sequence: Sequence
    ) -> tuple[tuple[Sequence, ...], tuple[Sample, ...]]:
        """One draw; or one for each sequence, if this row ends the prompt that all have."""
        asks = request.decoding.asks
        if not sequence.num_drawn:
            live = request.live_sequences
            if len(live) > 1 and live[1].table is None and is_joint(live):
                samples = tuple(sample for one in live for sample in asks(one))
                return (live if samples else ()), samples
        samples = asks(sequence)
        return ((sequence,) if samples else ()), samples

    # ----------------------------------------------------------------- scores of a prompt

    def scorable(self, draft: Draft, request: Request, sequence: Sequence, granted: int) -> int:
        """As many of the granted tokens as may be scored in this step; the rest is handed back."""
        if request.num_unscored <= draft.scores_left:
            return granted
        computed = sequence.num_computed
        first_to_score = max(len(request.prompt_logprobs), computed)
        allowed = min(granted, first_to_score + draft.scores_left - computed)
        draft.shares.left += granted - allowed
        return allowed

    def _score(
        self, draft: Draft, request: Request, sequence: Sequence, first: int, last: int
    ) -> Score | None:
        """What to score of the positions first .. last - 1: each tells of the token after it."""
        prompt, num_top = request.submit.prompt, request.submit.sampling.prompt_logprobs
        first = max(first, len(request.prompt_logprobs))
        token_ids = prompt[first + 1 : last + 1]
        if not token_ids or num_top is None or sequence is not request.live_sequences[0]:
            return None
        draft.scores_left -= len(token_ids)
        return Score(first, token_ids, num_top)
