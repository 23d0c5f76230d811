"""How many blocks of requests that gave way main memory holds: the CPU pool.

It has the blocks of --num-cpu-blocks-override, or else --swap-space. Its pages are not touched
before a block is swapped out, so that a server whose requests never give way is no larger for it;
but a GPU's are pinned, and there from the start. What the user asked for and does not fit is
refused; the default is lowered instead.
"""

from dataclasses import dataclass
from typing import Final

from services.executor.sizing import DEFAULT_CAP_REQUESTS, FREE_SHARE, PoolPlan
from shared.errors import StartError
from shared.geometry import blocks_in

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class SwapWishes:
    """What the user asked for; `is_default`: nobody said how much, `space_gib` is the usual."""

    space_gib: float
    is_default: bool = False
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """The CPU pool to be made.

    `why_lowered` says why it is smaller than the default of --swap-space, if it is.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    why_lowered: str | None = None

    @property
    def space_bytes(self) -> int:
        """Bytes of the whole pool, once every block was used."""
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"swap space: {self.num_blocks:,} blocks = {self.num_blocks * self.block_size:,} "
            f"tokens, {self.space_bytes / _GIB:.2f} GiB"
        )


def plan_swap_space(
    wishes: SwapWishes, pool: PoolPlan, available_bytes: int, *, is_pinned: bool = False
) -> SwapPlan:
    """Size the CPU pool.

    Args:
        wishes: the flags.
        pool: the pool whose blocks it takes in.
        available_bytes: main memory that is free beside weights, logits and, without a GPU, `pool`.
        is_pinned: a GPU's. torch takes pinned memory in powers of two.
    Raises: StartError with what is asked, what is there, and which flag to change.
    """
    free = f"{available_bytes / _GIB:.2f} GiB are free beside the model and its KV pool"
    if is_pinned and available_bytes:
        available_bytes = 1 << (available_bytes.bit_length() - 1)
        free += f" ({available_bytes / _GIB:.2f} of them pinned, which comes in powers of two)"
    block_bytes, most = pool.block_bytes, available_bytes // pool.block_bytes
    if wishes.num_blocks is not None:
        if wishes.num_blocks > most:
            raise StartError(
                f"--num-cpu-blocks-override {wishes.num_blocks}: they would need "
                f"{wishes.num_blocks * block_bytes / _GIB:.2f} GiB, and {free}; lower it to {most} "
                "or less"
            )
        return SwapPlan(wishes.num_blocks, pool.block_size, block_bytes)
    asked = int(wishes.space_gib * _GIB) // block_bytes
    if not wishes.is_default and asked > most:
        raise StartError(
            f"--swap-space {wishes.space_gib:g}: {free}; lower it to "
            f"{available_bytes * 100 // _GIB / 100:.2f} or less"
            + ("" if is_pinned else ", or give the KV pool less with --kv-cache-memory-bytes")
        )
    num_blocks, why_lowered = asked, None
    if wishes.is_default and asked > int(FREE_SHARE * most):
        num_blocks, why_lowered = int(FREE_SHARE * most), free
    useful = DEFAULT_CAP_REQUESTS * blocks_in(pool.max_model_len, pool.block_size)
    if wishes.is_default and useful < num_blocks:
        num_blocks = useful
        why_lowered = f"{DEFAULT_CAP_REQUESTS} requests of {pool.max_model_len} tokens use no more"
    return SwapPlan(num_blocks, pool.block_size, block_bytes, why_lowered)
