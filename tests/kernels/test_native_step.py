"""The whole step in native code: right, and the same bit by bit however it is cut."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu.native.backend import NativeKernels
from kernels.interface import PackedBatch
from kernels.reference import ReferenceKernels
from services.executor.model.llama import Llama
from tests.executor.model.teacher import Teacher, all_logits
from tests.executor.model.tiny import random_prompts
from tests.kernels.backends import INT8_KINDS, KINDS, NATIVE
from tests.kernels.batches import poison
from tests.kernels.decoders import Sizes, random_decoder

SIZES = Sizes()
EVERY_KIND = KINDS | INT8_KINDS
FORMS = {
    "odd sizes": Sizes(),
    "biases": Sizes(has_bias=True, tied=False),
    "one key head": Sizes(heads=5, kv_heads=1, head_dim=8, hidden=40),
    "a head each": Sizes(heads=3, kv_heads=3, head_dim=64, hidden=192, inner=160),
    "wide heads": Sizes(heads=2, kv_heads=1, head_dim=136),
    "many queries a key": Sizes(heads=26, kv_heads=1, head_dim=16, layers=1),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoder_of(kind: str, backend: str = "native", sizes: Sizes = SIZES) -> Llama:
    """A random decoder with weights and cache of a kind."""
    dtype, kv_dtype = EVERY_KIND[kind]
    kernels = NATIVE[backend](dtype, quantization="int8" if kind in INT8_KINDS else None)
    return random_decoder(kernels, sizes, kv_dtype)


def whole(model: Llama, prompt: list[int], block_size: int = 16) -> Tensor:
    """All logits of one prompt, computed alone and in one piece."""
    return Teacher(model, [prompt], block_size).step([0], [len(prompt)])


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_equals_the_reference(form: str, backend: str) -> None:
    reference = random_decoder(ReferenceKernels(torch.float32), FORMS[form])
    model = random_decoder(NATIVE[backend](torch.float32), FORMS[form])
    assert model.is_one_step
    prompts = random_prompts(FORMS[form].vocab, 1, 7, 40, 90)
    expected = all_logits(reference, prompts)
    for block_size in (1, 3, 8, 16, 32):
        for got, wanted in zip(all_logits(model, prompts, block_size), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("length", [255, 256, 257, 1030])
def test_long_contexts_equal_the_reference(length: int, backend: str) -> None:
    sizes = Sizes(layers=1, heads=2, kv_heads=1)
    prompts = random_prompts(sizes.vocab, length)
    wanted = all_logits(random_decoder(ReferenceKernels(torch.float32), sizes), prompts)[0]
    model = random_decoder(NATIVE[backend](torch.float32), sizes)
    torch.testing.assert_close(whole(model, prompts[0]), wanted, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", NATIVE)
def test_bfloat16_is_near_float32(backend: str) -> None:
    prompts = random_prompts(117, 60, 300)
    exact = all_logits(random_decoder(NATIVE[backend](torch.float32)), prompts)
    rounded = all_logits(random_decoder(NATIVE[backend](torch.bfloat16)), prompts)
    for got, wanted in zip(rounded, exact, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(chunk: int, backend: str, kind: str) -> None:
    model = decoder_of(kind, backend)
    (prompt,) = random_prompts(117, 530)
    wanted = whole(model, prompt)
    for block_size in (16, 3):
        teacher = Teacher(model, [prompt], block_size, seed=chunk)
        pieces = [min(chunk, 530 - start) for start in range(0, 530, chunk)]
        got = torch.cat([teacher.step([0], [count]) for count in pieces])
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_is_the_same_alone_among_seven_and_among_sixty_four(backend: str, kind: str) -> None:
    model = decoder_of(kind, backend)
    prompts = random_prompts(117, *(5 + 9 * n for n in range(64)))
    wanted = [whole(model, prompt) for prompt in prompts]
    for size in (7, 64):
        teacher = Teacher(model, prompts[:size], 16, seed=size)
        rows = list(range(size))
        first = teacher.step(rows, [len(prompt) - 3 for prompt in prompts[:size]])
        for row, part in enumerate(torch.split(first, [len(p) - 3 for p in prompts[:size]])):
            assert torch.equal(part, wanted[row][:-3])
        for step in range(3):  # decode
            answers = teacher.step(rows, [1] * size)
            for row in rows:
                assert torch.equal(answers[row], wanted[row][step - 3])


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("backend", NATIVE)
def test_prompts_and_decoding_rows_mix(backend: str, kind: str) -> None:
    model = decoder_of(kind, backend)
    prompts = random_prompts(117, 400, 33, 300, 1, 90)
    for got, prompt in zip(all_logits(model, prompts, 16, decoded=25), prompts, strict=True):
        assert torch.equal(got, whole(model, prompt))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_prefix_that_another_row_has_computed(kind: str) -> None:
    model = decoder_of(kind)
    (prompt,) = random_prompts(117, 320)
    wanted = whole(model, prompt)
    pool = model.allocate_pool(40, 16)
    poison(pool)
    owner = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int()[:20]
    model.forward(pool, one_row(prompt, 0, 320, owner))
    hit = torch.cat((owner[:18], torch.tensor([39, 38], dtype=torch.int32)))
    hit[18:] = torch.tensor([b for b in range(40) if b not in owner.tolist()][:2])
    got = model.forward(pool, one_row(prompt, 288, 319, hit))
    assert torch.equal(got, wanted[288:319])
    assert torch.equal(model.forward(pool, one_row(prompt, 319, 320, hit)), wanted[319:])


def one_row(prompt: list[int], start: int, end: int, table: Tensor) -> PackedBatch:
    """Tokens [start, end) of one sequence; the logits of each."""
    positions = torch.arange(start, end)
    return PackedBatch(
        token_ids=torch.tensor(prompt[start:end]),
        positions=positions.int(),
        slots=table[positions // 16].long() * 16 + positions % 16,
        row_starts=torch.tensor([0, end - start], dtype=torch.int32),
        context_lengths=torch.tensor([end], dtype=torch.int32),
        block_tables=table.view(1, -1),
        logit_tokens=torch.arange(end - start),
    )


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.usefixtures("threads")
def test_the_same_on_any_number_of_threads(kind: str) -> None:
    model = decoder_of(kind)
    prompts = random_prompts(117, 600, 20, 1100)
    answers = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        answers.append(torch.cat(all_logits(model, prompts, 16, decoded=3)))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_context_of_nine_thousand(kind: str) -> None:
    model = decoder_of(kind, sizes=Sizes(layers=1, heads=2, kv_heads=1, head_dim=8))
    (prompt,) = random_prompts(117, 9000)
    wanted = whole(model, prompt)
    teacher = Teacher(model, [prompt], 16)
    teacher.step([0], [8500])
    got = torch.cat([teacher.step([0], [1]) for _ in range(5)])
    assert torch.equal(got, wanted[8500:8505])
    assert wanted.isfinite().all()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_blocks_beyond_two_to_the_31st_number(kind: str) -> None:
    """A pool of more numbers than int32 counts; only the pages of a few blocks are touched."""
    model = decoder_of(kind)
    (prompt,) = random_prompts(117, 30)
    block_numbers = model.kv_bytes_per_token * 16 // EVERY_KIND[kind][1].itemsize
    num_blocks = 2**31 // block_numbers + 10
    pool = model.allocate_pool(num_blocks, 16)
    table = torch.tensor([num_blocks - 1, num_blocks - 3], dtype=torch.int32)
    for block in table.tolist():
        poison(pool[block])
    got = model.forward(pool, one_row(prompt, 0, 30, table))
    assert torch.equal(got, whole(model, prompt))


def test_only_wanted_logits_in_the_order_asked_for() -> None:
    model = random_decoder(NativeKernels(torch.bfloat16))
    (prompt,) = random_prompts(117, 50)
    wanted = whole(model, prompt)
    for chosen in ([], [49], [3, 3, 49, 0]):
        pool = model.allocate_pool(4, 16)
        batch = one_row(prompt, 0, 50, torch.tensor([2, 0, 3, 1], dtype=torch.int32))
        asked = torch.tensor(chosen, dtype=torch.int64)
        batch = PackedBatch(
            batch.token_ids, batch.positions, batch.slots, batch.row_starts,
            batch.context_lengths, batch.block_tables, asked,
        )  # fmt: skip
        assert torch.equal(model.forward(pool, batch), wanted[asked])


def test_a_token_that_is_nobody_is_refused() -> None:
    model = random_decoder(NativeKernels(torch.float32))
    with pytest.raises(ValueError, match="token id 117 is outside the vocabulary of 117"):
        whole(model, [5, 117])
    with pytest.raises(ValueError, match="token id -1"):
        whole(model, [5, -1])


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_row_of_nan_ends_nobody_else(kind: str) -> None:
    """A NaN that one row has in its cache stays there."""
    model = decoder_of(kind)
    prompts = random_prompts(117, 40, 50)
    wanted = whole(model, prompts[1])
    pool = model.allocate_pool(8, 16)
    tables = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6]], dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        model.forward(pool, one_row(prompt, 0, len(prompt) - 1, tables[row]))
    poison(pool[1])
    ends = [len(prompt) - 1 for prompt in prompts]
    got = model.forward(
        pool,
        PackedBatch(
            token_ids=torch.tensor([prompt[-1] for prompt in prompts]),
            positions=torch.tensor(ends).int(),
            slots=torch.tensor([int(tables[r, e // 16]) * 16 + e % 16 for r, e in enumerate(ends)]),
            row_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
            context_lengths=torch.tensor([40, 50], dtype=torch.int32),
            block_tables=tables,
            logit_tokens=torch.tensor([0, 1]),
        ),
    )
    assert got[0].isnan().all()
    assert torch.equal(got[1], wanted[-1])
