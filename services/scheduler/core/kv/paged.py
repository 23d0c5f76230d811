"""Paged allocation: any free block serves any table. Source: Kwon et al. 2023, section 4.2."""

from collections.abc import Iterable

from services.scheduler.core.kv.allocator import Appended
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.kv.usage import KVUsage, paged_usage
from shared.errors import InvariantBroken
from shared.messages import Move


class PagedAllocator:
    """Hands out a block when a table's last one is full; waste is less than a block a sequence."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[BlockTable, None] = {}

    @property
    def tables(self) -> Iterable[BlockTable]:
        """Every table that was started or forked and not freed, oldest first."""
        return self._tables.keys()

    def start(self) -> BlockTable:
        """An empty table; blocks come with `append`."""
        table = BlockTable(self.block_size)
        self._tables[table] = None
        return table

    def append(self, table: BlockTable, num_places: int) -> Appended:
        """Assign up to `num_places` next places, with as many blocks as that takes.

        A partly filled last block that others share is copied before it is written to: the table
        gets a block of its own (copy-on-write, figure 8).
        """
        copies: tuple[Move, ...] = ()
        num_empty = table.num_empty
        if num_empty and num_places and self.pool.ref_count(table.block_ids[-1]) > 1:
            if not self.pool.num_available:
                return Appended(0)
            shared, own = table.block_ids[-1], self.pool.take()
            table.block_ids[-1] = own
            self.pool.release(shared)
            copies = (Move(shared, own),)
        placed = min(num_places, num_empty)
        if placed:
            table.fill(placed)
        while placed < num_places and self.pool.num_available:
            table.add(self.pool.take())
            chunk = min(num_places - placed, self.block_size)
            table.fill(chunk)
            placed += chunk
        return Appended(placed, copies)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whoever writes first copies."""
        twin = self.start()
        for block_id in table.block_ids:
            self.pool.share(block_id)
            twin.block_ids.append(block_id)
        twin.num_filled = table.num_filled
        return twin

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, the last first. Raises: InvariantBroken if that was done before."""
        if table not in self._tables:
            raise InvariantBroken(f"a table of {len(table)} blocks was freed twice")
        del self._tables[table]
        while table.block_ids:
            self.pool.release(table.block_ids.pop())
        table.num_filled = 0

    def usage(self) -> KVUsage:
        """Where the pool's places are, counted from the tables now."""
        return paged_usage(self.pool, self._tables, self.block_size)
