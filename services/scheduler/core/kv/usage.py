"""Where the places of a KV pool are: the four parts of figure 2 of the paper, and the rest."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.table import BlockTable
from shared.ids import BlockId


@dataclass(frozen=True, slots=True)
class KVUsage:
    """A pool at one moment.

    tokens + reserved + internal + external + places of free and cached blocks = all places.

    Attributes:
        num_free: blocks with nothing in them.
        num_cached: blocks that no table holds and whose content may be shared again.
        num_shared: blocks that several tables hold.
        tokens: places that hold a token (a shared block counts once).
        reserved: empty places set aside for tokens that will come.
        internal: empty places inside handed-out blocks that nobody else can use.
        external: free places that cannot be handed out because of where they lie.
        num_logical: entries of all block tables: blocks held if nobody shared.
        num_different: different blocks among them.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_shared: int
    tokens: int
    reserved: int = 0
    internal: int = 0
    external: int = 0
    num_cached: int = 0
    num_logical: int = 0
    num_different: int = 0

    @property
    def sharing_saved(self) -> float:
        """Blocks that sharing saves as a share of those held without it, 0 to 1.

        Source: Kwon et al. 2023, section 6.3.
        """
        if not self.num_logical:
            return 0.0
        return (self.num_logical - self.num_different) / self.num_logical

    @property
    def num_used(self) -> int:
        """Blocks that some table holds, or a plan in flight."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def used_share(self) -> float:
        """Used blocks as a share of all, 0 to 1."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0


def paged_usage(pool: BlockPool, tables: Iterable[BlockTable], block_size: int) -> KVUsage:
    """The usage of a paged pool: nothing is reserved, and no free block is out of reach.

    Blocks that only a plan in flight holds have nothing but internal places.
    """
    filled: dict[BlockId, int] = {}
    num_logical = 0
    for table in tables:
        num_logical += len(table)
        for block_id, num_filled in table.entries():
            filled[block_id] = max(num_filled, filled.get(block_id, 0))
    tokens = sum(filled.values())
    return KVUsage(
        block_size=block_size,
        num_blocks=pool.num_blocks,
        num_free=len(pool.free_blocks),
        num_shared=sum(pool.ref_count(block_id) > 1 for block_id in filled),
        tokens=tokens,
        internal=(len(filled) + pool.num_settling) * block_size - tokens,
        num_cached=len(pool.cached_blocks),
        num_logical=num_logical,
        num_different=len(filled),
    )
