"""The blocks of one device: which are free, and how many tables point to each of the others."""

from collections.abc import Sequence

from shared.errors import InvariantBroken
from shared.ids import BlockId


class BlockPool:
    """Free list and reference counts of one device.

    The free list is a stack: the block freed last is handed out first, because its memory is warm
    and, on a CPU, already backed by pages. A block whose count falls to zero *settles* first: it is
    not handed out before `settle()`, which the planner calls between plans (law 9).
    """

    def __init__(self, num_blocks: int, free_order: Sequence[int] | None = None) -> None:
        """`free_order` lists all block ids in the order they are handed out; default ascending."""
        order = range(num_blocks) if free_order is None else free_order
        if sorted(order) != list(range(num_blocks)):
            raise InvariantBroken(f"free_order must hold each of 0..{num_blocks - 1} once")
        self.num_blocks = num_blocks
        self._free = [BlockId(block_id) for block_id in reversed(order)]
        self._settling: list[BlockId] = []
        self._ref_counts = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_settling(self) -> int:
        """Blocks freed since the last `settle()`."""
        return len(self._settling)

    @property
    def free_blocks(self) -> tuple[BlockId, ...]:
        """Every block no table points to, the next one to be handed out first."""
        return (*reversed(self._free), *self._settling)

    def ref_count(self, block_id: BlockId) -> int:
        """How many tables point to this block; 0 is free."""
        return self._ref_counts[block_id]

    def take(self) -> BlockId:
        """Hand out a block with one reference. Raises: InvariantBroken when none is available."""
        if not self._free:
            raise InvariantBroken(
                f"a block was asked of a pool with none available ({len(self._settling)} of "
                f"{self.num_blocks} are settling)"
            )
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: BlockId) -> None:
        """One more table points to this block. Raises: InvariantBroken if it is free."""
        if not self._ref_counts[block_id]:
            raise InvariantBroken(f"block {block_id} is free and cannot be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_id: BlockId) -> None:
        """One table less points to this block. Raises: InvariantBroken if it is free already."""
        if not self._ref_counts[block_id]:
            raise InvariantBroken(f"block {block_id} was freed twice")
        self._ref_counts[block_id] -= 1
        if not self._ref_counts[block_id]:
            self._settling.append(block_id)

    def settle(self) -> None:
        """What was freed may be handed out from now on, the block freed last first."""
        self._free += self._settling
        self._settling.clear()
