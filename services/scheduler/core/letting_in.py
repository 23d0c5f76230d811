"""Who comes back and who starts, once all who run have their places in a step."""

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.draft import Draft
from services.scheduler.core.giving_way import GivingWay
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.lifecycle import Change
from services.scheduler.core.pins import Found
from services.scheduler.core.precedence import Precedence
from services.scheduler.core.request import Request
from services.scheduler.core.rows import Rows
from services.scheduler.core.sequence import Sequence


class LettingIn:
    """Lets in whoever is next while there are blocks, seats and tokens for it."""

    def __init__(
        self,
        *,
        book: Book,
        holdings: Holdings,
        giving_way: GivingWay,
        precedence: Precedence,
        rows: Rows,
        counters: Counters,
        max_running: int,
        watermark_blocks: int,
    ) -> None:
        """So many blocks are left free for those who run."""
        self._book = book
        self._holdings = holdings
        self._pool = holdings.allocator.pool
        self._giving_way = giving_way
        self._precedence = precedence
        self._rows = rows
        self._counters = counters
        self._max_running = max_running
        self._watermark_blocks = watermark_blocks

    def let_in(self, draft: Draft, is_idle: bool) -> None:
        """Swapped ones before waiting ones, but for waiting ones of a lower number: in turns."""
        while True:
            num_before = draft.num_running
            self._return_swapped(draft, is_idle)
            self._start_waiting(draft)
            if draft.num_running == num_before or not self._book.swapped:
                return

    def can_start(self, request: Request) -> bool:
        """Whether there is room for this waiting request beside all who run."""
        num_running = sum(one.num_seats for one in self._book.running)
        return self._hits_if_it_can_start(request, self._promised(), num_running) is not None

    # ----------------------------------------------------------------- those who come back

    def _return_swapped(self, draft: Draft, is_idle: bool) -> None:
        """In their order, when there is room for all they hold and for what they compute next."""
        swapped = self._book.swapped
        if not self._precedence.is_swapped_next:
            return
        promised = self._promised()
        while self._precedence.is_swapped_next and draft.shares.left:
            request = swapped.first
            need, num_seats = self._holdings.to_return(request), request.num_seats
            free = self._pool.num_available - promised
            has_room = free - need >= (self._watermark_blocks if self._book.running else 0)
            if not has_room or draft.num_running + num_seats > self._max_running:
                if is_idle and draft.is_empty and not self._book.running:
                    self._giving_way.drop_swapped(request)  # the only way on
                    continue
                return
            self._book.change(request, Change.SWAP_IN)
            moves = self._holdings.swap_in(request, draft.step_id)
            self._giving_way.moved(request, moves)
            draft.swap_in += moves
            draft.swapped_in.append(request)
            self._come_back(draft, request)
            for sequence in request.live_sequences:
                if sequence.table is not None:
                    self._place_new(draft, request, sequence)
            promised += self._holdings.to_come(request)

    def _come_back(self, draft: Draft, request: Request) -> None:
        draft.num_running += request.num_seats
        draft.reserved += self._holdings.to_come(request)
        request.is_protected = True

    # ----------------------------------------------------------------- those who wait

    def _start_waiting(self, draft: Draft) -> None:
        """In their order: the first who does not fit holds up those behind it."""
        waiting = self._book.waiting
        if (
            not waiting
            or self._precedence.is_swapped_next
            or not draft.shares.left
            or draft.num_running >= self._max_running
        ):
            return
        promised = self._promised()
        while waiting and draft.shares.left and not self._precedence.is_swapped_next:
            request = waiting.first
            if request.is_suspect and draft.sent:
                return
            if request.num_unscored and not draft.scores_left:
                return
            hits = self._hits_if_it_can_start(request, promised, draft.num_running)
            if hits is None:
                return
            self._start(draft, request, hits)
            promised += self._holdings.to_come(request)
            if request.is_suspect:
                return

    def _start(self, draft: Draft, request: Request, hits: Found) -> None:
        self._book.change(request, Change.START)
        lead = self._holdings.start(request, hits)
        if request.is_pin:
            self._come_back(draft, request)
        elif request.num_cached is None:
            request.num_cached = hits.num_tokens
            self._count_hits(request, lead, hits)
            draft.num_running += request.num_seats
        else:
            self._come_back(draft, request)
        self._place_new(draft, request, lead)

    def _count_hits(self, request: Request, lead: Sequence, hits: Found) -> None:
        """Of a first start only."""
        can_hit = self._holdings.prefix is not None or len(self._book.pins) > 0
        if can_hit and request.takes_hits:
            self._counters.prefix_cache_queries += lead.num_tokens
            self._counters.prefix_cache_hits += hits.num_tokens
        if hits.prefix is not None:
            hits.prefix.num_hits += 1
            self._counters.pin_hits += 1

    def _place_new(self, draft: Draft, request: Request, sequence: Sequence) -> None:
        granted = draft.shares.grant_new(sequence.num_to_compute)
        if request.num_unscored:
            granted = self._rows.scorable(draft, request, sequence, granted)
        if granted:
            self._rows.place(draft, request, sequence, granted)

    def _hits_if_it_can_start(
        self, request: Request, promised: int, num_running: int
    ) -> Found | None:
        """The blocks it finds, if those for its other tokens are free, above the watermark.

        None if it has to wait: for blocks, for others to end, or for a block that is coming.
        """
        if num_running + request.num_seats > self._max_running:
            return None
        hits = self._precedence.find(request)
        if hits is None:
            return None
        block_size = self._holdings.allocator.block_size
        need = hits.num_new_blocks(self._holdings.to_come(request), block_size)
        need += sum([self._pool.is_cached(block_id) for block_id in hits.blocks])
        spare = self._watermark_blocks if self._book.running else 0
        return hits if self._pool.num_available - promised - need >= spare else None

    def _promised(self) -> int:
        """Blocks that those who run need for tokens known but not yet placed."""
        return sum(map(self._holdings.to_come, self._book.running))
