"""What the kernels keep of a batch: its work, for as long as somebody has the batch."""

import gc
import weakref

import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from ops.gpu.ragged import poisoned_pool, write_all
from tests.kernels.batches import Case, draw


def test_a_batch_is_not_kept_alive() -> None:
    kernels = TritonKernels(torch.float16, Gpu())
    drawn = draw(Case(((20, 1), (9, 4)), 16, 4, 2), torch.float16)
    pool = poisoned_pool(kernels, drawn, torch.float16)
    write_all(pool, drawn)
    queries, batch = drawn.queries, drawn.batch
    first = kernels.paged_attention(pool, 1, queries, batch, 0.1)
    assert first.isfinite().all()
    kept = weakref.ref(batch)
    del drawn, batch
    gc.collect()
    assert kept() is None
    again = draw(Case(((20, 1), (9, 4)), 16, 4, 2), torch.float16).batch
    assert torch.equal(kernels.paged_attention(pool, 1, queries, again, 0.1), first)
