"""Tokens drawn with NumPy: for the toy, and where there is no native library.

Nobody sorts the vocabulary: without top-k and top-p no order is needed, and with them only the
tokens near the greatest logit are looked at, as many as it takes, and of these only the ones about
as likely as the last one kept are sorted. What is drawn, and why in whole numbers: sampler.py.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.executor.adjustment import adjust, is_adjusted
from services.executor.logprobs import Ask, answer, is_usable
from shared.errors import InvariantBroken
from shared.messages import PositionLogprobs, Sample
from shared.sampling import DrawParams

_AT_ONCE: Final = 64
"""Most rows of which there are adjusted copies at one time."""
_CHUNK: Final = 256
"""Masses are summed in chunks of so many tokens; only the one the die falls on is searched."""
_GROUP_ELEMENTS: Final = 65_536
"""Rows are worked on in groups of about so many logits: what stays in a core's cache."""
_TINY: Final = float(np.finfo(np.float32).tiny)
_DEPTHS: Final = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""How far below the greatest to look, in temperatures; exp(-128) is 0 in float32."""
_SORTED_AT_ONCE: Final = 512
_BINS: Final = 4096
_BITS: Final = 51
"""A sum of masses is a whole number of at most so many bits."""


class NumpyDrawing:
    """Draws with NumPy, on one thread."""

    def draw(
        self,
        rows: Sequence[NDArray[np.float32]],
        samples: Sequence[Sample],
        dice: NDArray[np.float64],
    ) -> list[int | None]:
        """As `Drawing` says."""
        tokens: list[int | None] = []
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(rows), _AT_ONCE):
                part = slice(first, first + _AT_ONCE)
                adjusted = [
                    _adjusted(row, sample)
                    for row, sample in zip(rows[part], samples[part], strict=True)
                ]
                tokens += _draw(adjusted, [wish_of(sample) for sample in samples[part]], dice[part])
        return tokens

    def tell(self, asks: Sequence[Ask]) -> list[PositionLogprobs | None]:
        """As `Drawing` says."""
        return [answer(ask) if is_usable(ask.row) else None for ask in asks]


def wish_of(sample: Sample) -> DrawParams:
    """How to draw. Raises: InvariantBroken if the sample draws nothing."""
    if sample.draw is None:
        raise InvariantBroken(f"sample of sequence {sample.sequence_id} draws nothing")
    return sample.draw


def _adjusted(row: NDArray[np.float32], sample: Sample) -> NDArray[np.float32]:
    """[vocab_size]: the row; if its sample adjusts it a copy, adjusted."""
    if not is_adjusted(sample):
        return row
    if not is_usable(row):  # a NaN must not hide among what is excluded
        return np.full_like(row, np.nan)
    row = row.copy()
    adjust(row, sample)
    return row


def _draw(
    rows: Sequence[NDArray[np.float32]],
    wishes: Sequence[DrawParams],
    dice: NDArray[np.float64],
) -> list[int | None]:
    """A token for each row, [vocab_size], of which wishes only say how to draw it."""
    tokens: list[int | None] = [None] * len(rows)
    plain = []
    for i, (row, params) in enumerate(zip(rows, wishes, strict=True)):
        if params.temperature == 0:
            tokens[i] = _greedy(row)
        elif params.top_p < 1 or 0 < params.top_k < len(row):
            tokens[i] = _draw_ordered(row, params, float(dice[i]))
        else:
            plain.append(i)
    for group in _groups(plain, max(1, _GROUP_ELEMENTS // len(rows[0]))):
        drawn = _draw_plain(
            np.stack([rows[i] for i in group]), [wishes[i] for i in group], dice[group]
        )
        for i, token in zip(group, drawn, strict=True):
            tokens[i] = token
    return tokens


def _groups(indexes: list[int], most: int) -> Iterator[list[int]]:
    for start in range(0, len(indexes), most):
        yield indexes[start : start + most]


def kept(
    logits: NDArray[np.float32], params: DrawParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that top-k, top-p and min-p leave of one row, smallest first, and their masses.

    Args:
        logits: [vocab_size], finite or -inf, at least one finite.
        params: with temperature > 0.
    """
    size = len(logits)
    x = _scaled(logits, logits.max(), params.temperature)
    top_k = params.top_k if 0 < params.top_k < size else 0
    wanted = 0.0 if top_k else _share(params.top_p, _masses(np.exp(x), size).sum(dtype=np.float64))
    for depth in _DEPTHS:
        ids = np.flatnonzero(x >= -depth)
        weights = np.exp(x[ids])
        masses = _masses(weights.copy(), size).astype(np.float64)
        if len(ids) >= top_k if top_k else masses.sum() >= wanted:
            break
    if top_k:
        first = _first(logits[ids], np.ones(len(ids)), top_k)
        ids, weights, masses = ids[first], weights[first], masses[first]
        wanted = _share(params.top_p, masses.sum())
    if params.top_p < 1:
        first = _first(logits[ids], masses, wanted)
        ids, weights, masses = ids[first], weights[first], masses[first]
    is_likely = weights >= np.float32(params.min_p)
    return ids[is_likely], masses[is_likely]


def _masses(weights: NDArray[np.float32], vocab_size: int) -> NDArray[np.float32]:
    """Weights, at most 1, as whole numbers of units; in place."""
    weights *= np.float32(2.0 ** (_BITS - (vocab_size - 1).bit_length()))
    return np.rint(weights, out=weights)


def _share(top_p: float, total: np.float64) -> float:
    """The least whole number that is this share of the total."""
    return float(np.ceil(top_p * total))


def _first(
    values: NDArray[np.float32], masses: NDArray[np.float64], wanted: float
) -> NDArray[np.int64]:
    """The fewest greatest values whose masses sum up to `wanted`, as ascending indices.

    Of equal values the one with the smaller index comes first. Many values are put into bins, by
    value, so that only the bin in which the sum reaches `wanted` has to be sorted.
    """
    greatest, spread = values.max(), np.ptp(values)
    is_edge = np.ones(len(values), bool)
    is_sure = ~is_edge
    if len(values) > _SORTED_AT_ONCE and spread > 0:
        bins = ((greatest - values) * (_BINS / spread)).astype(np.int64)
        sums = np.cumsum(np.bincount(bins, masses))
        crossing = np.searchsorted(sums, wanted)
        is_sure, is_edge = bins < crossing, bins == crossing
        wanted -= sums[crossing - 1] if crossing else 0.0
    edge = np.flatnonzero(is_edge)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(masses[edge]), wanted)) + 1
    is_sure[edge[:enough]] = True
    return np.flatnonzero(is_sure)


def _greedy(row: NDArray[np.float32]) -> int | None:
    best = int(row.argmax())  # the first of equals; a NaN counts as greatest
    return best if np.isfinite(row[best]) else None


def _fall(dice: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many units come before the tokens that the dice fall on."""
    return np.minimum(np.floor(dice * totals), totals - 1)


def _draw_ordered(row: NDArray[np.float32], params: DrawParams, die: float) -> int | None:
    """Draw from one row, [vocab_size], with top-k or top-p."""
    if not np.isfinite(row.max()):
        return None
    ids, masses = kept(row, params)
    sums = np.cumsum(masses)
    before = _fall(np.array(die), sums[-1])
    return int(ids[np.searchsorted(sums, before, side="right")])


def _draw_plain(
    rows: NDArray[np.float32], wishes: list[DrawParams], dice: NDArray[np.float64]
) -> list[int | None]:
    """Draw from each row, [n, vocab_size], with no more than a temperature and min-p."""
    num_rows, vocab_size = rows.shape
    peaks = rows.max(axis=1)
    usable = np.isfinite(peaks)
    rows[~usable] = peaks[~usable] = 0  # drawn like the others, and thrown away
    temperatures = np.array([params.temperature for params in wishes])
    weights = np.exp(_scaled(rows, peaks[:, None], temperatures[:, None]))
    min_p = np.array([params.min_p for params in wishes], np.float32)
    if min_p.any():
        weights *= weights >= min_p[:, None]
    masses = _masses(weights, vocab_size)

    chunks = np.arange(0, vocab_size, _CHUNK)
    sums = np.cumsum(np.add.reduceat(masses, chunks, axis=1, dtype=np.float64), axis=1)
    before = _fall(dice, sums[:, -1])
    chosen = (sums <= before[:, None]).sum(axis=1)
    every = np.arange(num_rows)
    before -= np.where(chosen > 0, sums[every, chosen - 1], 0)

    ids = chunks[chosen, None] + np.arange(_CHUNK)
    inner = masses[every[:, None], np.minimum(ids, vocab_size - 1)] * (ids < vocab_size)
    sums = np.cumsum(inner, axis=1, dtype=np.float64)
    tokens = chunks[chosen] + (sums <= before[:, None]).sum(axis=1)
    return [int(token) if ok else None for token, ok in zip(tokens, usable, strict=True)]


def _scaled(
    logits: NDArray[np.float32],
    peak: NDArray[np.float32] | np.float32,
    temperature: NDArray[np.float64] | float,
) -> NDArray[np.float32]:
    """How far each logit lies below the greatest, in temperatures: 0 or less."""
    divisor = np.maximum(temperature, _TINY).astype(np.float32)
    scaled: NDArray[np.float32] = (logits - peak) / divisor
    return scaled
