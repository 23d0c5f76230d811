"""What the kernels keep of a batch: its work, for as long as somebody has the batch."""

import gc
import weakref

import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from ops.gpu.ragged import Attention, answer, poisoned_pool, write_all
from tests.kernels.batches import Case, draw


def test_a_batch_is_not_kept_alive() -> None:
    kernels = TritonKernels(torch.float16, Gpu())
    drawn = draw(Case(((20, 1), (9, 4)), 16, 4, 2), torch.float16)
    pool = poisoned_pool(kernels, drawn, torch.float16)
    write_all(pool, drawn)
    first = answer(kernels, pool, drawn, Attention())
    batch = weakref.ref(drawn.batch)
    del drawn
    gc.collect()
    assert batch() is None
    again = draw(Case(((20, 1), (9, 4)), 16, 4, 2), torch.float16)
    assert torch.equal(answer(kernels, pool, again, Attention()), first)
