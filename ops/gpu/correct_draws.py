"""Draws on the device against the executor's own, and against float64 where they differ."""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.triton_gpu.sampling import Draws, sample
from ops.gpu.section import Section
from services.executor.numpy_drawing import kept
from services.executor.philox import uniforms
from services.executor.sampler import Draw, NoToken, Sampler
from shared.ids import SequenceId
from shared.messages import Sample
from shared.sampling import DrawParams

WISHES: Final = {
    "greedy": DrawParams(temperature=0),
    "temperature": DrawParams(temperature=0.8),
    "top-k": DrawParams(top_k=40),
    "top-p": DrawParams(top_p=0.8),
    "min-p": DrawParams(min_p=0.05),
    "all": DrawParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.02),
}
_NEAR: Final = 1e-6
"""Of the kept mass: so near to a border exponentials that differ in their last bits may decide."""


def draws(section: Section, what: str) -> None:
    """A row for each kind of draw; all of them in one launch, over rows of which some are odd."""
    vocab, rows, each = (500, 3, 2) if section.is_dry else (128_256, 16, 16)
    logits = 3 * torch.randn(rows + 2, vocab, generator=torch.Generator().manual_seed(0))
    logits[rows, 300] = float("nan")
    logits[rows + 1] = float("-inf")
    wanted = [
        Draw(i % (rows + 2), 7 + i, Sample(SequenceId(i), i % 3, 1000 - 77 * i, params))
        for i, params in enumerate(params for params in WISHES.values() for _ in range(each))
    ]
    there, asked = logits.to(section.device), _on_device(wanted, section.device)
    got = (sample(there, asked, chunk=256) if section.is_dry else sample(there, asked)).tolist()
    right = Sampler().draw(logits.numpy(), wanted)
    num_near = 0
    for draw, token, other in zip(wanted, got, right, strict=True):
        if token == (-1 if isinstance(other, NoToken) else other):
            continue
        if draw.row < rows and _is_near(logits[draw.row], draw, token):
            num_near += 1
        else:
            section.fault(what, f"token {token}, not {other}: {draw.params}, row {draw.row}")
    note = f"as on the CPU, {num_near} but for rounding"
    section.row(what, len(wanted), "draws", note)


def _on_device(wanted: list[Draw], device: torch.device) -> Draws:
    def column(numbers: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return Draws(
        rows=column([draw.row for draw in wanted], torch.int32),
        temperatures=column([draw.params.temperature for draw in wanted], torch.float32),
        top_ks=column([draw.params.top_k for draw in wanted], torch.int32),
        top_ps=column([draw.params.top_p for draw in wanted], torch.float64),
        min_ps=column([draw.params.min_p for draw in wanted], torch.float32),
        seeds=column([draw.sample.seed for draw in wanted], torch.int64),
        indexes=column([draw.sample.index for draw in wanted], torch.int64),
        positions=column([draw.position for draw in wanted], torch.int64),
    )


def _is_near(logits: Tensor, draw: Draw, token: int) -> bool:
    """Whether the die falls within rounding of what `token` has of the kept mass."""
    if draw.params.temperature == 0:
        return False
    row = logits.numpy()
    ids, _ = kept(row, draw.params)
    weights = np.exp((row[ids].astype(np.float64) - row.max()) / draw.params.temperature)
    ends = np.cumsum(weights) / weights.sum()
    places = np.flatnonzero(ids == token)
    if not len(places):
        return False
    place = int(places[0])
    (die,) = uniforms([draw.sample.seed], [draw.sample.index], [draw.position])
    begin = ends[place - 1] if place else 0.0
    return bool(begin - _NEAR <= die <= ends[place] + _NEAR)
