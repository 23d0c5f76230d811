"""The blocks of one device: which are free, which are kept, and how many tables hold the others.

A block is in one of three states: *free* (nothing in it is worth anything), *cached* (no table
holds it, but its content is known by a hash and may be shared again) or *held*. A held block that
its last table gave up *settles* first: it is held until `settle()` finds that no plan in flight
names it (laws 2 and 9), and only then becomes free or cached.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from shared.errors import InvariantBroken
from shared.ids import BlockId


def _nothing(block_id: BlockId) -> None:
    """Nobody wants to hear that a block was evicted."""


class BlockPool:
    """Free list, cached blocks and reference counts of one device; every step costs O(1).

    The free list is a stack: the block freed last is handed out first, because its memory is warm
    and, on a CPU, already backed by pages. When it is empty, the cached block that was given up
    longest ago is evicted.
    """

    def __init__(self, num_blocks: int, free_order: Sequence[int] | None = None) -> None:
        """`free_order` lists all block ids in the order they are handed out; default ascending."""
        order = range(num_blocks) if free_order is None else free_order
        if sorted(order) != list(range(num_blocks)):
            raise InvariantBroken(f"free_order must hold each of 0..{num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[BlockId], None] = _nothing
        """Told of every cached block that is handed out for something else."""
        self._free = [BlockId(block_id) for block_id in reversed(order)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._settling: dict[BlockId, None] = {}
        self._kept: set[BlockId] = set()
        self._ref_counts = [0] * num_blocks
        self._last_steps = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_settling(self) -> int:
        """Blocks that no table holds and that come free by themselves: at once, or at a result."""
        return len(self._settling)

    @property
    def free_blocks(self) -> tuple[BlockId, ...]:
        """Blocks with nothing in them, the next one to be handed out first."""
        return tuple(reversed(self._free))

    @property
    def cached_blocks(self) -> tuple[BlockId, ...]:
        """Blocks that no table holds and whose content is known, the next to be evicted first."""
        return tuple(self._cached)

    @property
    def settling_blocks(self) -> tuple[BlockId, ...]:
        """Blocks that no table holds any more and that are not handed out yet."""
        return tuple(self._settling)

    def ref_count(self, block_id: BlockId) -> int:
        """How many tables hold this block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: BlockId) -> bool:
        """Whether no table holds this block, and it could be handed out."""
        return block_id in self._cached

    def take(self) -> BlockId:
        """Hand out a block with one reference. Raises: InvariantBroken when none is available."""
        if self._free:
            block_id = self._free.pop()
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self._kept.discard(block_id)
            self.on_evict(block_id)
        else:
            raise InvariantBroken(
                f"a block was asked of a pool with none available ({len(self._settling)} of "
                f"{self.num_blocks} are settling)"
            )
        self._ref_counts[block_id] = 1
        self._last_steps[block_id] = 0
        return block_id

    def keep(self, block_id: BlockId) -> None:
        """Its content is known: once nobody holds it, it is cached, not free."""
        if not self._ref_counts[block_id]:
            raise InvariantBroken(f"block {block_id} is held by nobody and cannot be kept")
        self._kept.add(block_id)

    def share(self, block_id: BlockId) -> None:
        """One more table holds this block. Raises: InvariantBroken if it is free."""
        if not self._ref_counts[block_id]:
            if block_id in self._cached:
                del self._cached[block_id]
            elif block_id in self._settling and block_id in self._kept:
                del self._settling[block_id]
            else:
                raise InvariantBroken(f"block {block_id} is free and cannot be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_id: BlockId, last_step: int = 0) -> None:
        """One table less holds this block; the last plan that names it there is `last_step`.

        Raises: InvariantBroken if nobody holds it.
        """
        count = self._ref_counts[block_id] - 1
        if count < 0:
            raise InvariantBroken(f"block {block_id} was freed twice")
        self._ref_counts[block_id] = count
        if last_step > self._last_steps[block_id]:
            self._last_steps[block_id] = last_step
        if not count:
            self._settling[block_id] = None

    def settle(self, before_step: int | None = None) -> None:
        """What was given up may be handed out from now on, the block freed last first.

        Blocks that a plan from `before_step` on names stay settling; None is no such plan.
        """
        if not self._settling:
            return
        stay: dict[BlockId, None] = {}
        for block_id in self._settling:
            if before_step is not None and self._last_steps[block_id] >= before_step:
                stay[block_id] = None
            elif block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
        self._settling = stay
