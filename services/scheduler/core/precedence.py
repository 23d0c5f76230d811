"""Who is let in next, and who runs that has to make way for it.

Swapped requests come before waiting ones, but for a waiting one of a lower priority number. Nobody
waits for running ones of a greater number than its own: if it lacks blocks or a seat these give
way, last first, before any row of the round is placed (law 2), and tokens are kept for it from
their prompts; and a block that one of them computes it computes itself. Two kinds are spared: who
came back and has no new token yet, so that everybody gets further between giving way twice; and all
of them, where even all together would not be enough.

A pinned prefix has the lowest number of all, under either policy: everybody makes way for it. Else,
where all priorities are equal, nothing of this ever happens.
"""

from collections import Counter
from itertools import takewhile

from services.scheduler.core.book import Book
from services.scheduler.core.draft import Draft
from services.scheduler.core.giving_way import GivingWay
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.pins import Found
from services.scheduler.core.request import Request
from shared.ids import BlockId


class Precedence:
    """Knows who is next, and makes running ones of a greater number give way to it."""

    def __init__(
        self,
        *,
        book: Book,
        holdings: Holdings,
        giving_way: GivingWay,
        max_running: int,
        watermark_blocks: int,
    ) -> None:
        self._book = book
        self._holdings = holdings
        self._pool = holdings.allocator.pool
        self._giving_way = giving_way
        self._max_running = max_running
        self._watermark_blocks = watermark_blocks

    @property
    def is_swapped_next(self) -> bool:
        """Whether a swapped request comes before all that wait."""
        swapped, waiting = self._book.swapped, self._book.waiting
        if not swapped:
            return False
        return not waiting or waiting.first.priority >= swapped.first.priority

    @property
    def urgent(self) -> Request | None:
        """Who is next, if a greater number runs."""
        running = self._book.running
        line = self._book.swapped if self.is_swapped_next else self._book.waiting
        if not running or not line:
            return None
        return line.first if line.first.priority < running.last.priority else None

    def find(self, request: Request) -> Found | None:
        """Where one that waits can start; None: it waits for a block that is being computed.

        It does so only where one who comes before it computes that, or one of its own number.
        """
        running, priority = self._book.running, request.priority
        if not running or running.last.priority <= priority:
            return self._holdings.known.hits(request)
        before = takewhile(lambda one: one.priority <= priority, running)
        return self._holdings.known.hits(request, before)

    def make_way(self, draft: Draft) -> None:
        """Let those give way for whom the next one must not wait; they have no row yet."""
        urgent = self.urgent
        if urgent is not None:
            for victim in self._victims(urgent, draft.num_running) or ():
                self._giving_way.give_way(draft, victim)

    def tokens_to_keep(self, draft: Draft) -> int:
        """How much of the budget nobody of a greater number may take; 0 if it is of no use now."""
        urgent = self.urgent
        if urgent is None or urgent.is_suspect or self._victims(urgent, draft.num_running) != []:
            return 0
        if urgent.status is Status.SWAPPED:
            return min(urgent.num_seats, draft.shares.left)
        found = self._found(urgent)
        num_found = found.num_tokens if found is not None else 0
        return min(urgent.live_sequences[0].num_to_compute - num_found, draft.shares.left)

    def _found(self, urgent: Request) -> Found | None:
        return Found([], 0) if urgent.status is Status.SWAPPED else self.find(urgent)

    def _victims(self, urgent: Request, num_running: int) -> list[Request] | None:
        """Who has to give way so that `urgent` can be let in; None: it cannot be, whoever does."""
        found = self._found(urgent)
        if found is None:
            return None  # its next block is being computed: it waits for that
        to_come, running, pool = self._holdings.to_come, self._book.running, self._pool
        if urgent.status is Status.SWAPPED:
            need = self._holdings.to_return(urgent)
        else:
            block_size = self._holdings.allocator.block_size
            need = found.num_new_blocks(to_come(urgent), block_size)
            need += sum([not pool.ref_count(block_id) for block_id in found.blocks])
        seats = self._max_running - num_running
        free = pool.num_available + pool.num_settling - sum(map(to_come, running))
        behind = [r for r in running if r.priority > urgent.priority and not r.is_protected]
        victims: list[Request] = []
        given: Counter[BlockId] = Counter()
        while True:
            spare = self._watermark_blocks if len(victims) < len(running) else 0
            if seats >= urgent.num_seats and free - need >= spare:
                return victims
            if not behind:
                return None
            victim = behind.pop()
            victims.append(victim)
            seats += victim.num_seats
            free += to_come(victim)
            for block_id in _blocks(victim):
                given[block_id] += 1
                if given[block_id] == pool.ref_count(block_id):
                    free += 1
                    need += block_id in found.blocks  # found there still, but free no more


def _blocks(request: Request) -> list[BlockId]:
    """Every block of every table of a request; a shared one once for each."""
    tables = [sequence.table for sequence in request.live_sequences if sequence.table is not None]
    return [block_id for table in tables for block_id in table.block_ids]
