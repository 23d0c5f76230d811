"""What the executor asks of a model: a pool, a forward pass, and block copies."""

from typing import Protocol

from torch import Tensor

from kernels.interface import PackedBatch
from shared.geometry import ModelShape


class DecoderModel(Protocol):
    """A decoder with a paged cache. The executor knows no more of a model than this."""

    shape: ModelShape
    eos_token_ids: tuple[int, ...]
    kv_dtype: str
    kv_bytes_per_token: int
    times_auto: float
    """How many times the tokens a pool holds that it would hold in the weights' own dtype."""

    def allocate_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """A pool of `num_blocks` blocks of `block_size` tokens; its layout is the back end's."""

    def allocate_swap_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """A pool in main memory for blocks that are swapped out of the other."""

    def forward(self, pool: Tensor, batch: PackedBatch) -> Tensor:
        """Write the batch's keys and values, attend, and return logits; nothing for autograd.

        Returns: [num_logits, vocab_size] float32, one row per entry of `batch.logit_tokens`.
        """

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks between pools or within one; see `Kernels.copy_blocks`."""
