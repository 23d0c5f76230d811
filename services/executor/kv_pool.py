"""The KV pools: the executor's only state that outlives a step, but for the tokens drawn last."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.executor.model.interface import DecoderModel
from shared.ids import BlockId
from shared.messages import Move


class KVPools:
    """The pool that a forward pass reads (`gpu`) and the one that swapped blocks lie in (`cpu`).

    The names are roles: without a GPU both are in main memory. What a block looks like inside is
    the model's business; here blocks are only moved whole, all of one kind of a plan in one call:
    over every layer, every fork and every request.
    """

    def __init__(
        self, model: DecoderModel, num_gpu_blocks: int, block_size: int, num_cpu_blocks: int = 0
    ) -> None:
        self._copy_blocks = model.copy_blocks
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.gpu = model.allocate_pool(num_gpu_blocks, block_size)
        self.cpu = (
            model.allocate_swap_pool(num_cpu_blocks, block_size)
            if num_cpu_blocks
            else torch.empty(0)
        )

    def swap_out(self, moves: Sequence[Move]) -> None:
        """Copy blocks from the gpu pool to the cpu pool."""
        self._copy(self.gpu, self.cpu, moves)

    def swap_in(self, moves: Sequence[Move]) -> None:
        """Copy blocks from the cpu pool to the gpu pool."""
        self._copy(self.cpu, self.gpu, moves)

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy blocks within the gpu pool."""
        self._copy(self.gpu, self.gpu, moves)

    def _copy(self, source: Tensor, destination: Tensor, moves: Sequence[Move]) -> None:
        if moves:
            pairs = [(move.source, move.destination) for move in moves]
            self._copy_blocks(source, destination, torch.tensor(pairs, dtype=torch.int64))

    def clear(self, block: BlockId) -> None:
        """Write zeros to this block of either pool."""
        self.gpu[block].zero_()
        self.cpu[block].zero_()
