"""Places beyond 2**31: a block's number times its stride needs 64 bits."""

import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from ops.gpu import ragged
from ops.gpu.ragged import Attention, answer, expected, worst
from tests.kernels.batches import Case, draw

BLOCKS = 60_010
CASE = Case(((44, 1), (300, 1), (20, 10)), 16, 4, 2, 128, num_layers=5)
"""A block has 5 layers of 2 heads of 16 keys and values of 128: 40,960 numbers."""


def test_blocks_far_into_a_large_pool() -> None:
    how = Attention(kv_dtype=ragged.E4M3)
    drawn = draw(CASE, torch.float16)
    kernels = TritonKernels(torch.float16, Gpu())
    tables = drawn.batch.block_tables
    tables[tables < BLOCKS] += BLOCKS - drawn.num_blocks
    pool = torch.empty(BLOCKS, 5, 2, 2, 16, 128, dtype=ragged.E4M3)  # untouched memory is free
    assert 59_990 * pool.stride(0) > 2**31
    ragged.write_all(pool, drawn)
    assert worst(answer(kernels, pool, drawn, how), expected(drawn, how)) < 3e-3

    kernels.copy_blocks(pool, pool, torch.tensor([[int(tables[0, 0]), 3], [int(tables[1, 1]), 5]]))
    assert torch.equal(
        pool[[3, 5], 4].view(torch.uint8), pool[tables[[0, 1], [0, 1]].long(), 4].view(torch.uint8)
    )
