"""Attention: a set of cases for each feature, the same bits in any company, large pools."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.triton_gpu.backend import E4M3, Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from ops.gpu.batches import Case, Drawn, draw, pack
from ops.gpu.ragged import (
    TOLERANCE,
    Attention,
    answer,
    error_of,
    expected,
    poisoned_pool,
    worst,
    write_all,
)
from ops.gpu.section import Section

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
MIXED: Final = ((1, 1), (5, 5), (270, 1), (40, 3), (37, 20))
LONG: Final = ((1, 1), (70, 1), (300, 1), (600, 1), (1025, 1), (90, 50), (33, 33))
FEW: Final = ((70, 1), (300, 1), (40, 20))
"""(context length, new tokens): decode whole and in splits, chunks of prompts."""

Cases = list[tuple[Case, torch.dtype, Attention]]


def by_feature(section: Section, what: str) -> None:
    """Each feature is a row."""
    cases_of = _tiny_cases if section.is_dry else _cases
    for feature, cases in cases_of(section.gpu).items():
        _feature(section, f"{what}: {feature}", cases)


def _cases(gpu: Gpu) -> dict[str, Cases]:
    """By feature. Every new set of what the compiler knows takes it seconds: few of each."""
    how, slopes = partial(Attention, gpu=gpu), _slopes(32)
    scaled = partial(Attention, kv_dtype=E4M3, kv_scales=(0.037, 0.021))
    llama, small = Case(MIXED, 16, 32, 32, 128), Case(LONG, 16, 8, 2)
    wide = replace(small, head_dim=128)
    cases: dict[str, Cases] = {
        "heads of Llama-2-7B": [(llama, dtype, how()) for dtype in (BRAIN, HALF)],
        "heads of Llama-3-8B": [(replace(llama, kv_heads=8, rows=LONG), BRAIN, how())],
        "float32": [(small, FULL, how())],
        "layer-major pool": [(llama, BRAIN, how(layout=Layout.LAYER_MAJOR))],
        "window": [(wide, BRAIN, how(window)) for window in (1, 65, 256)],
        "soft cap": [(small, FULL, how(soft_cap=3.0))],
        "ALiBi": [(replace(small, heads=32, kv_heads=32), FULL, how(slopes=slopes))],
        "e4m3 by bits": [(llama, BRAIN, scaled(gpu=replace(gpu, has_e4m3=False)))],
        "head sizes": [
            (Case(MIXED, 16, 4, 2, head_dim), HALF, how()) for head_dim in (64, 80, 96, 256)
        ],
        "one key-value head": [
            (Case(FEW, 16, 71, 1), HALF, how()),
            (Case(FEW, 16, 7, 1, 128), BRAIN, how()),
        ],
        "block sizes": [
            (Case(MIXED, block_size, 8, 2, 128), BRAIN, how()) for block_size in (1, 3, 8, 32, 128)
        ],
        "window, cap and ALiBi": [(Case(LONG, 16, 32, 8, 80), HALF, how(40, 3.0, slopes))],
    }
    if gpu.has_e4m3:
        cases["e4m3 by hardware"] = [
            (llama, BRAIN, scaled(gpu=gpu)),
            (Case(LONG, 8, 6, 2, 80), HALF, scaled(40, 3.0, gpu=gpu)),
        ]
    return cases


def _tiny_cases(gpu: Gpu) -> dict[str, Cases]:
    """For the interpreter: a case a feature."""
    how, small = partial(Attention, gpu=gpu), Case(FEW, 16, 4, 2)
    scaled = how(kv_dtype=E4M3, kv_scales=(0.037, 0.021))
    return {
        "float32": [(small, FULL, how())],
        "bfloat16": [(small, BRAIN, how())],
        "head sizes": [(replace(small, head_dim=80), HALF, how())],
        "layer-major pool": [(small, HALF, how(layout=Layout.LAYER_MAJOR))],
        "window, cap and ALiBi": [(small, FULL, how(40, 3.0, _slopes(4)))],
        "e4m3 by bits": [(small, HALF, scaled)],
    }


def _slopes(heads: int) -> Tensor:
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))


def _feature(section: Section, what: str, cases: Cases) -> None:
    largest, count = 0.0, 0
    for case, dtype, how in cases:
        if not section.has_time(what):
            continue
        with section.guarded(what):
            error = error_of(case, dtype, how, section.device)
            largest, count = max(largest, error), count + 1
            if not error < TOLERANCE[dtype]:
                section.fault(what, f"error {error:.3g}, {TOLERANCE[dtype]} allowed: {case}")
    if count:
        section.row(what, largest, "error at most", f"{count} cases against float64")


def invariance(section: Section, what: str) -> None:
    """A row alone, in other blocks, and a prompt in chunks give the same bits."""
    kernels = TritonKernels(HALF, section.gpu)
    rows = FEW if section.is_dry else ((600, 1), (300, 1), (40, 40), (5, 1), (90, 30))
    drawn = draw(Case(rows, 16, 4, 2), HALF)

    def answered(part: Drawn) -> Tensor:
        pool = poisoned_pool(kernels, part, HALF)
        write_all(pool, part)
        return answer(kernels, pool, part, device=section.device)

    together = answered(drawn)
    starts = drawn.batch.row_starts.tolist()
    for row, (length, new) in enumerate(rows):
        for first, last in _chunks(length - new, length):
            at = starts[row] + first - (length - new)
            alone = answered(_alone(drawn, row, first, last, at))
            if not torch.equal(alone, together[at : at + last - first]):
                section.fault(what, f"tokens {first} to {last} of {length} differ when alone")
    section.row(what, len(rows), "rows", "alone, in chunks, in other blocks")


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """A decode whole; a prompt in two pieces of several tokens."""
    if last - first < 4:
        yield first, last
    else:
        middle = (first + last) // 2
        yield from ((first, middle), (middle, last))


def _alone(drawn: Drawn, row: int, first: int, last: int, at: int) -> Drawn:
    """One sequence as long as `last`, `first` and what follows new: token `at` of the batch."""
    num_blocks = -(-last // 16)
    rows = ((last, last - first),)
    return replace(
        drawn,
        case=replace(drawn.case, rows=rows),
        batch=pack(rows, 16, list(range(num_blocks)), torch.Generator()),
        keys=[drawn.keys[row][:last]],
        values=[drawn.values[row][:last]],
        queries=drawn.queries[at : at + last - first],
        num_blocks=num_blocks,
    )


def offsets(section: Section, what: str) -> None:
    """Blocks far into a pool of more than 2**31 numbers: attention, and a copy."""
    num_blocks, case = 60_010, Case(((44, 1), (300, 1), (20, 10)), 16, 4, 2, 128, num_layers=5)
    kernels = TritonKernels(HALF, section.gpu)
    drawn = draw(case, HALF)
    how = Attention(kv_dtype=E4M3, gpu=section.gpu)
    near = poisoned_pool(kernels, drawn, E4M3)
    write_all(near, drawn)
    far = torch.empty(num_blocks, *near.shape[1:], dtype=E4M3, device=section.device)
    shift = num_blocks - drawn.num_blocks
    far[shift:] = near.to(section.device)
    tables = drawn.batch.block_tables
    tables[tables < num_blocks] += shift
    error = worst(answer(kernels, far, drawn, how, section.device), expected(drawn, how))
    if not error < TOLERANCE[HALF]:
        section.fault(what, f"attention: error {error:.3g}")
    last = int(tables[0, 0])
    kernels.copy_blocks(far, far, torch.tensor([[last, 3]]))
    if not torch.equal(far[3].view(torch.uint8), far[last].view(torch.uint8)):
        section.fault(what, "copy-on-write: other bits")
    section.row(what, far.numel(), "numbers", "attention and a copy")
