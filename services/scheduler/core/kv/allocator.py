"""What the planner asks of whoever hands out blocks: start, append, fork, free."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.kv.usage import KVUsage
from shared.ids import BlockId
from shared.messages import Move


class Appended(NamedTuple):
    """How many places were assigned, and which blocks must be copied before they are written."""

    num_places: int
    copies: tuple[Move, ...] = ()


class Allocator(Protocol):
    """Hands out the blocks of one pool. Paged now; the paper's baselines are others of these."""

    block_size: int
    pool: BlockPool

    @property
    def tables(self) -> Iterable[BlockTable]:
        """Every table that holds blocks, oldest first."""

    def start(self, hits: Iterable[BlockId] = (), num_tokens: int | None = None) -> BlockTable:
        """A table for a new sequence, over blocks that are there already.

        They are full, or hold its first `num_tokens` tokens.
        """

    def append(
        self, table: BlockTable, num_places: int, most_blocks: int | None = None, step_id: int = 0
    ) -> Appended:
        """Assign up to `num_places` next places: fewer, or none, when blocks run out.

        At most `most_blocks` blocks are taken for it; None: as many as there are. `step_id` is the
        plan that will write there.
        """

    def fork(self, table: BlockTable, num_blocks: int | None = None) -> BlockTable:
        """A second table over the same blocks, or over its first `num_blocks`, which are full."""

    def free(self, table: BlockTable) -> None:
        """Give all blocks of a table back. Raises: InvariantBroken if it was given back before."""

    def usage(self) -> KVUsage:
        """Where the pool's places are, counted from the tables now."""
