"""A whole decoder over the back end: prompts in chunks, tokens one by one, a fork and a swap."""

import pytest
import torch

from kernels.interface import Kernels
from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from services.executor.model.llama import Llama
from shared.geometry import blocks_in
from tests.kernels.batches import pack
from tests.kernels.decoders import Sizes, random_decoder

BLOCK_SIZE = 8
SIZES = Sizes(heads=6, kv_heads=2, head_dim=16, vocab=50)
STEPS = (((20, 20), (9, 9)), ((21, 1), (30, 21)), ((22, 1), (31, 1)))
"""Of each step, (context length, new tokens) of two sequences."""


def logits_of(kernels: Kernels) -> torch.Tensor:
    """[steps * 2, vocab_size]; before the last step every block is swapped, and one is copied."""
    model: Llama = random_decoder(kernels, SIZES)
    pool = model.allocate_pool(20, BLOCK_SIZE)
    aside = model.allocate_swap_pool(20, BLOCK_SIZE)
    tokens = torch.randint(1, SIZES.vocab, (2, 40), generator=torch.Generator().manual_seed(0))
    places = [3, 1, 4, 15, 9, 2, 6, 5, 8, 10]
    answers = []
    for step, rows in enumerate(STEPS):
        if step == 2:
            moves = torch.tensor([[block, 19 - block] for block in places])
            model.copy_blocks(pool, aside, moves)
            pool.fill_(float("nan"))
            model.copy_blocks(aside, pool, moves.flip(1))
            model.copy_blocks(pool, pool, torch.tensor([[places[0], 16]]))
            places[0] = 16
        answers.append(model.forward(pool, batch_of(rows, places, tokens)))
    return torch.cat(answers)


def batch_of(rows, places, tokens):  # type: ignore[no-untyped-def]
    """As `pack` makes it, with five blocks for each sequence and its own tokens."""
    room = [blocks_in(length, BLOCK_SIZE) for length, _ in rows]
    free = [*places[: room[0]], *places[5 : 5 + room[1]]]
    batch = pack(rows, BLOCK_SIZE, free, torch.Generator())
    ids = [tokens[i, length - new : length] for i, (length, new) in enumerate(rows)]
    batch.token_ids.copy_(torch.cat(ids))
    return batch


@pytest.mark.parametrize("layout", list(Layout))
def test_a_decoder_equals_the_reference(layout: Layout) -> None:
    wanted = logits_of(ReferenceKernels(torch.float32))
    got = logits_of(TritonKernels(torch.float32, Gpu(), layout))
    torch.testing.assert_close(got, wanted, atol=3e-4, rtol=1e-4)


def test_in_half_precision_it_is_near() -> None:
    wanted = logits_of(ReferenceKernels(torch.bfloat16))
    got = logits_of(TritonKernels(torch.bfloat16, Gpu()))
    assert got.isfinite().all()
    assert float((got - wanted).abs().max() / wanted.std()) < 0.1
