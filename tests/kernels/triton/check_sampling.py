"""The fused sampler against the executor's on the CPU: the same dice, the same rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.triton_gpu.device.sampling import uniform
from kernels.triton_gpu.sampling import Draws, sample
from services.executor.numpy_drawing import kept
from services.executor.philox import uniforms
from services.executor.sampler import Draw, NoToken, Sampler
from shared.messages import Sample
from shared.sampling import DrawParams

VOCAB = 500
CHUNK = 512
PARAMS = {
    "temperature": DrawParams(temperature=0.8),
    "hot": DrawParams(temperature=3.0),
    "top-k": DrawParams(top_k=40),
    "top-k 1": DrawParams(top_k=1),
    "top-p": DrawParams(top_p=0.8),
    "tiny top-p": DrawParams(top_p=1e-6),
    "min-p": DrawParams(min_p=0.05),
    "all": DrawParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.02),
}


@triton.jit
def dice_kernel(out, seeds, indexes, positions):
    i = tl.program_id(0)
    die = uniform(tl.load(seeds + i), tl.load(indexes + i), tl.load(positions + i))
    tl.store(out + i, die)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draws_of(rows: list[int], params: list[DrawParams]) -> list[Draw]:
    return [
        Draw(row, 7 + i, Sample(i, i % 3, 1000 - 77 * i, draw))
        for i, (row, draw) in enumerate(zip(rows, params, strict=True))
    ]


def on_device(draws: list[Draw]) -> Draws:
    def column(numbers: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype)

    return Draws(
        rows=column([draw.row for draw in draws], torch.int32),
        temperatures=column([draw.params.temperature for draw in draws], torch.float32),
        top_ks=column([draw.params.top_k for draw in draws], torch.int32),
        top_ps=column([draw.params.top_p for draw in draws], torch.float64),
        min_ps=column([draw.params.min_p for draw in draws], torch.float32),
        seeds=column([draw.sample.seed for draw in draws], torch.int64),
        indexes=column([draw.sample.index for draw in draws], torch.int64),
        positions=column([draw.position for draw in draws], torch.int64),
    )


def both(
    logits: torch.Tensor, draws: list[Draw], chunk: int = CHUNK
) -> tuple[list[int], list[int | NoToken]]:
    got = sample(logits, on_device(draws), chunk).tolist()
    return got, Sampler().draw(logits.numpy(), draws)


def test_the_dice_are_those_of_the_cpu_bit_by_bit() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, 42]
    indexes = [0, 1, 2**63 - 1, 7, 2**40 + 3, 5, 6]
    positions = [0, 17, 2**33 + 1, 2**63 - 1, 9, 2**31, 2**32 - 1]
    out = torch.zeros(len(seeds), dtype=torch.float64)
    dice_kernel[(len(seeds),)](out, *(torch.tensor(x) for x in (seeds, indexes, positions)))
    assert out.tolist() == uniforms(seeds, indexes, positions).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = logits_of(4)
    logits[1, [30, 400, 5]] = 50.0
    logits[2] = -3.0
    logits[3] = -0.0
    logits[3, 9] = 0.0
    got, wanted = both(logits, draws_of([0, 1, 2, 3], [DrawParams(temperature=0)] * 4))
    assert got == wanted
    assert got[1:] == [5, 0, 0]


@pytest.mark.parametrize("params", PARAMS)
def test_every_draw_is_within_rounding_of_its_share(params: str) -> None:
    """The die, in units of the kept mass, lies on the token drawn; float64 says where that is."""
    logits, count = logits_of(1), 6
    draws = draws_of([0] * count, [PARAMS[params]] * count)
    got, wanted = both(logits, draws)
    dice = uniforms(
        [draw.sample.seed for draw in draws],
        [draw.sample.index for draw in draws],
        [draw.position for draw in draws],
    )
    row = logits[0].numpy()
    ids, _ = kept(row, PARAMS[params])
    weights = np.exp((row[ids].astype(np.float64) - row.max()) / PARAMS[params].temperature)
    ends = np.cumsum(weights) / weights.sum()
    for token, die in zip(got, dice, strict=True):
        place = int(np.flatnonzero(ids == token)[0])
        assert (ends[place - 1] if place else 0) - 1e-6 <= die <= ends[place] + 1e-6
    assert got == wanted  # no die of these is that near to a border


EQUALS = {
    "all equal": (slice(None), DrawParams()),
    "half of them": (slice(0, None, 2), DrawParams(temperature=0.3)),
    "ties at the k-th": (slice(100, 400), DrawParams(top_k=123)),
    "ties at the p-th": (slice(100, 356), DrawParams(top_p=0.3125)),
    "both": (slice(3, None, 3), DrawParams(top_k=64, top_p=0.5)),
    "min-p 1": (slice(7, 300, 2), DrawParams(min_p=1.0)),
}


@pytest.mark.parametrize("name", EQUALS)
def test_where_weights_are_exact_every_token_is_the_same(name: str) -> None:
    place, params = EQUALS[name]
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, place] = 1.5
    got, wanted = both(logits, draws_of([0] * 8, [params] * 8))
    assert got == wanted
    assert len(set(got)) > 4
    assert set(got) <= set(kept(logits[0].numpy(), params)[0].tolist())


def test_what_top_k_keeps_is_exact() -> None:
    """With all of the mass on the last one kept, and none on the next."""
    logits = logits_of(1)
    order = logits[0].argsort(descending=True, stable=True)
    for k in (2, 100, VOCAB - 1):
        hidden = logits.clone()
        hidden[0, order[:k]] = torch.linspace(30, 29, k)
        draws = draws_of([0] * 2, [replace(PARAMS["hot"], top_k=k)] * 2)
        got, wanted = both(hidden, draws)
        assert got == wanted
        assert set(got) <= set(order[:k].tolist())


def test_a_vocabulary_of_several_chunks() -> None:
    draws = draws_of([0, 1, 0, 1], [PARAMS[name] for name in ("hot", "all", "top-k", "top-p")])
    got, wanted = both(logits_of(2), draws, chunk=128)
    assert got == wanted


def test_a_mixed_batch_with_rows_nobody_can_draw_from() -> None:
    logits = logits_of(5)
    logits[1, 300] = float("nan")
    logits[2, 5] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1:] = float("-inf")
    rows, params = [0, 1, 2, 3, 4, 0, 1], [*list(PARAMS.values())[:6], DrawParams(temperature=0)]
    got, wanted = both(logits, draws_of(rows, params))
    assert got == [-1 if isinstance(token, NoToken) else token for token in wanted]
    assert got.count(-1) == 4
    assert got[4] == 0


def test_the_distribution() -> None:
    """200 seeds over 8 tokens: chi-square with 7 degrees of freedom, 99.9 % below 24.3."""
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 20:500:60] = torch.linspace(0, 1.5, 8)
    draws = [Draw(0, 5, Sample(i, 0, i, DrawParams())) for i in range(200)]
    got = sample(logits, on_device(draws), CHUNK)
    share = logits[0].double().softmax(0)[20:500:60] * 200
    seen = torch.bincount((got - 20) // 60, minlength=8)
    assert float(((seen - share) ** 2 / share).sum()) < 24.3
