"""The CPU back end."""

import torch
from torch import Tensor

from kernels.cpu.linear import pack_linear
from kernels.interface import Linear, PackedBatch
from kernels.reference import KEYS, VALUES, ReferenceKernels


class CpuKernels(ReferenceKernels):
    """The reference with packed linears, and attention over whole gathered rows."""

    name = "cpu"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The weight in oneDNN's layout."""
        return pack_linear(weight, bias)

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values at `slots`, all at once."""
        block_size = pool.shape[4]
        blocks, offsets = slots // block_size, slots % block_size
        pool[blocks, layer, :, KEYS, offsets] = keys
        pool[blocks, layer, :, VALUES, offsets] = values

    def paged_attention(
        self, pool: Tensor, layer: int, queries: Tensor, batch: PackedBatch, scale: float
    ) -> Tensor:
        """Attend row by row over keys gathered through the block table."""
        starts, lengths = batch.row_starts.tolist(), batch.context_lengths.tolist()
        block_size = pool.shape[4]
        attended = []
        for row, length in enumerate(lengths):
            table = batch.block_tables[row, : -(-length // block_size)].long()
            tiles = pool[table, layer].transpose(0, 2).flatten(2, 3)[:, :, :length]
            row_queries = queries[starts[row] : starts[row + 1]].transpose(0, 1)
            places = torch.arange(length)
            seen = places <= places[length - row_queries.shape[1] :, None]
            out = torch.nn.functional.scaled_dot_product_attention(
                row_queries[None],
                tiles[KEYS][None],
                tiles[VALUES][None],
                attn_mask=seen,
                scale=scale,
                enable_gqa=True,
            )
            attended.append(out[0].transpose(0, 1))
        return torch.cat(attended)
