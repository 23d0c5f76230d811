"""The block table: a sequence's logical blocks, in order, and how many places hold tokens."""

from shared.errors import InvariantBroken
from shared.ids import BlockId


class BlockTable:
    """Physical block ids in logical order. Only the last block may be partly filled.

    `num_filled` counts the places assigned by the plans sent, computed or not; `last_step` is the
    last plan that names its blocks. Of its blocks, the first `num_known` are full, computed, and
    known to the prefix cache; those from there to `num_expected` are expected there. Tables are
    compared by identity: two sequences may hold equal ones.
    """

    __slots__ = (
        "_row", "block_ids", "block_size", "last_step", "num_expected", "num_filled", "num_known",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[BlockId] = []
        self.num_filled = 0
        self.last_step = 0
        self.num_known = 0
        self.num_expected = 0
        self._row: tuple[BlockId, ...] = ()

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def num_empty(self) -> int:
        """Places of the last block that hold no token yet."""
        return len(self.block_ids) * self.block_size - self.num_filled

    @property
    def row(self) -> tuple[BlockId, ...]:
        """The block ids as a plan wants them; made anew only when they have changed."""
        if len(self._row) != len(self.block_ids):
            self._row = tuple(self.block_ids)
        return self._row

    def filled(self, logical_block: int) -> int:
        """Filled places of one logical block (the paper's "# filled").

        Raises: InvariantBroken if the table has no such block.
        """
        if not 0 <= logical_block < len(self.block_ids):
            raise InvariantBroken(
                f"logical block {logical_block} of a table of {len(self.block_ids)}"
            )
        return min(self.block_size, self.num_filled - logical_block * self.block_size)

    def entries(self) -> tuple[tuple[BlockId, int], ...]:
        """(physical block, # filled) per logical block, as in figure 6 of the paper."""
        return tuple((block_id, self.filled(at)) for at, block_id in enumerate(self.block_ids))

    def fill(self, num_places: int) -> None:
        """Assign the next places. Raises: InvariantBroken beyond the last block."""
        if not 0 <= num_places <= self.num_empty:
            raise InvariantBroken(f"{num_places} places of {self.num_empty} empty ones")
        self.num_filled += num_places

    def add(self, block_id: BlockId) -> None:
        """Append a block. Raises: InvariantBroken unless all earlier ones are full (law 6)."""
        if self.num_empty:
            raise InvariantBroken(
                f"block {block_id} handed out while the last one has {self.num_empty} empty places"
            )
        self.block_ids.append(block_id)

    def point(self, logical_block: int, block_id: BlockId) -> None:
        """Put another physical block in the place of one: a copy of it, or one that is equal."""
        self.block_ids[logical_block] = block_id
        self._row = ()
