"""Ragged batches for the Triton back end, and the answer to each in float64 from the definition.

The pool is NaN where nobody wrote. All is made in main memory and moved to the device whole.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import E4M3, Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from ops.gpu.batches import Case, Drawn, draw, on_device
from shared.geometry import ModelShape

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error of an answer, by the dtype of queries; answers are averages of normal numbers."""


@dataclass(frozen=True)
class Attention:
    """What the answer depends on beside the batch."""

    window: int | None = None
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    kv_dtype: torch.dtype | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    layout: Layout = Layout.BLOCK_MAJOR
    gpu: Gpu = field(default_factory=Gpu)


def error_of(
    case: Case, dtype: torch.dtype, how: Attention = Attention(), device: torch.device = CPU
) -> float:
    """The largest error of one batch, attended to on `device`; inf if an answer is not finite."""
    drawn = draw(case, dtype)
    kernels = TritonKernels(dtype, how.gpu, how.layout, how.kv_scales)
    pool = poisoned_pool(kernels, drawn, how.kv_dtype or dtype)
    write_all(pool, drawn, how.kv_scales)
    return worst(answer(kernels, pool, drawn, how, device), expected(drawn, how))


def answer(
    kernels: TritonKernels,
    pool: Tensor,
    drawn: Drawn,
    how: Attention = Attention(),
    device: torch.device = CPU,
) -> Tensor:
    """[num_tokens, heads, head_dim] of the kernels, from the last layer; in main memory."""
    case = drawn.case
    slopes = None if how.slopes is None else how.slopes.to(device)
    attended = kernels.paged_attention(
        pool.to(device), case.num_layers - 1, drawn.queries.to(device),
        on_device(drawn.batch, device), case.head_dim**-0.5, how.window, how.soft_cap, slopes,
    )  # fmt: skip
    return attended.cpu()


def worst(got: Tensor, wanted: Tensor) -> float:
    """The largest difference; inf if one is not finite."""
    if got.shape != wanted.shape:
        raise ValueError(f"an answer of shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    error = (got.double() - wanted).abs().max()
    return float(error) if error.isfinite() else float("inf")


def poisoned_pool(kernels: TritonKernels, drawn: Drawn, dtype: torch.dtype) -> Tensor:
    """All NaN, in any dtype."""
    case = drawn.case
    shape = ModelShape(case.num_layers, case.heads, case.kv_heads, case.head_dim, 64, 100, 4096)
    spec = PoolSpec(shape, drawn.num_blocks, case.block_size, dtype, CPU)
    return kernels.allocate_pool(spec).fill_(float("nan"))


def write_all(pool: Tensor, drawn: Drawn, scales: tuple[float, float] = (1.0, 1.0)) -> None:
    """Every sequence's keys and values into the last layer, by the reference."""
    reference, layer = ReferenceKernels(pool.dtype), drawn.case.num_layers - 1
    size = drawn.case.block_size
    for row, (keys, values) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        places = torch.arange(len(keys))
        slots = drawn.batch.block_tables[row, places // size].long() * size + places % size
        k, v = (
            kept(numbers, pool.dtype, scale)
            for numbers, scale in zip((keys, values), scales, strict=True)
        )
        reference.write_kv(pool, layer, k, v, slots)


def expected(drawn: Drawn, how: Attention) -> Tensor:
    """[num_tokens, heads, head_dim] float64."""
    case, starts = drawn.case, drawn.batch.row_starts.tolist()
    group = case.heads // case.kv_heads
    answers = []
    for row, (keys, values) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        queries = drawn.queries[starts[row] : starts[row + 1]].double()
        k = stored(keys, how, 0).repeat_interleave(group, 1)
        v = stored(values, how, 1).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, k) * case.head_dim**-0.5
        if how.soft_cap:
            scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
        length = len(keys)
        places = torch.arange(length - len(queries), length)[:, None]
        distance = torch.arange(length) - places
        if how.slopes is not None:
            scores = scores + how.slopes.double()[:, None, None] * distance
        unseen = distance > 0
        if how.window:
            unseen |= distance <= -how.window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        answers.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(answers)


def stored(numbers: Tensor, how: Attention, part: int) -> Tensor:
    """float64 of what the pool keeps of keys (part 0) or values (part 1)."""
    dtype, scale = how.kv_dtype or numbers.dtype, how.kv_scales[part]
    return kept(numbers, dtype, scale).double() * (scale if dtype == E4M3 else 1.0)


def kept(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a pool of `dtype` keeps them; only e4m3 is scaled."""
    if dtype != E4M3:
        return numbers.to(dtype)
    return (numbers.float() * (1.0 / scale)).clamp(-448, 448).to(E4M3)
