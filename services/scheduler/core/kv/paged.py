"""Paged allocation: any free block serves any table. Source: Kwon et al. 2023, section 4.2."""

from collections.abc import Iterable

from services.scheduler.core.kv.allocator import Appended
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.kv.usage import KVUsage, paged_usage
from shared.errors import InvariantBroken
from shared.ids import BlockId
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

    def start(self, hits: Iterable[BlockId] = (), num_tokens: int | None = None) -> BlockTable:
        """A table over blocks that are there already; the others come with `append`.

        Of the last one it may have a part: then its first write copies that block.
        """
        table = BlockTable(self.block_size)
        self._tables[table] = None
        for block_id in hits:
            self.pool.share(block_id)
            table.block_ids.append(block_id)
        whole = len(table) * self.block_size
        table.num_filled = whole if num_tokens is None else num_tokens
        table.num_known = table.num_filled // self.block_size
        return table

    def append(
        self, table: BlockTable, num_places: int, most_blocks: int | None = None, step_id: int = 0
    ) -> Appended:
        """Assign up to `num_places` next places, with as many blocks as that takes.

        A partly filled last block that others share is copied before it is written to: the table
        gets a block of its own (copy-on-write, figure 8).
        """
        block_ids = table.block_ids
        num_empty = len(block_ids) * self.block_size - table.num_filled
        if 0 < num_places <= num_empty and self.pool.ref_count(block_ids[-1]) == 1:
            table.num_filled += num_places  # most decodes
            return Appended(num_places)
        left = self.pool.num_available
        if most_blocks is not None and most_blocks < left:
            left = most_blocks
        copies: tuple[Move, ...] = ()
        if num_empty and num_places and self.pool.ref_count(table.block_ids[-1]) > 1:
            if left < 1:
                return Appended(0)
            shared, own = table.block_ids[-1], self.pool.take()
            table.point(len(table) - 1, own)
            self.pool.release(shared, step_id)
            copies = (Move(shared, own),)
            left -= 1
        placed = min(num_places, num_empty)
        table.fill(placed)
        while placed < num_places and left > 0:
            table.add(self.pool.take())
            chunk = min(num_places - placed, self.block_size)
            table.fill(chunk)
            placed += chunk
            left -= 1
        return Appended(placed, copies)

    def fork(self, table: BlockTable, num_blocks: int | None = None) -> BlockTable:
        """A second table over the same blocks, or the first few; whoever writes first copies."""
        twin = self.start()
        for block_id in table.block_ids[:num_blocks]:
            self.pool.share(block_id)
            twin.block_ids.append(block_id)
        twin.num_filled = min(table.num_filled, len(twin) * self.block_size)
        twin.num_known = min(table.num_known, len(twin))
        return twin

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, the last first. Raises: InvariantBroken if that was done before."""
        if table not in self._tables:
            raise InvariantBroken(f"a table of {len(table)} blocks was freed twice")
        del self._tables[table]
        last_step = table.last_step
        while table.block_ids:
            self.pool.release(table.block_ids.pop(), last_step)
        table.num_filled = 0

    def usage(self) -> KVUsage:
        """Where the pool's places are, counted from the tables now."""
        return paged_usage(self.pool, self._tables, self.block_size)
