"""From logits to tokens: greedy, or one uniform number through the inverse of the kept mass.

A draw is a function of its logits, its `Sample` and its position, and of nothing else: no row's
arithmetic depends on who else is in the batch, so a request writes the same text alone and in
company.

First the logits are adjusted (adjustment.py), where the sample asks for it. The order of all tokens
is by logit, greatest first, and among equal logits by id, smallest first. In this order
  1. greedy takes the first,
  2. top-k keeps the first k exactly,
  3. top-p keeps the fewest first ones whose probability, among what top-k kept, is >= top_p,
  4. min-p keeps those whose probability is >= min_p times the first one's.
What is kept is laid out by token id, and the uniform number falls on one of them. A token whose
probability is below 1e-45 of the first one's is never drawn.

Nobody sorts the vocabulary: without top-k and top-p no order is needed, and with them only the
tokens near the greatest logit are looked at, as many as it takes, and of these only the ones about
as likely as the last one kept are sorted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.executor.adjustment import adjust, is_adjusted
from services.executor.logprobs import is_usable
from services.executor.philox import uniforms
from shared.errors import InvariantBroken
from shared.messages import Sample
from shared.sampling import DrawParams

_CHUNK: Final = 256
"""Probabilities are summed in chunks of this many tokens, so that no long running sum is needed."""
_GROUP_ELEMENTS: Final = 65_536
"""Rows are worked on in groups of about so many logits: what stays in a core's cache."""
_TINY: Final = float(np.finfo(np.float32).tiny)
_DEPTHS: Final = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""How far below the greatest to look, in temperatures; exp(-128) is 0 in float32."""
_SORTED_AT_ONCE: Final = 512
_BINS: Final = 4096


@dataclass(frozen=True, slots=True)
class Draw:
    """One `Sample` to draw: from which row of the logits, for which place in its sequence."""

    row: int
    position: int
    sample: Sample

    @property
    def params(self) -> DrawParams:
        """How to draw. Raises: InvariantBroken if the sample draws nothing."""
        if self.sample.draw is None:
            raise InvariantBroken(f"sample of sequence {self.sample.sequence_id} draws nothing")
        return self.sample.draw


class NoToken(Enum):
    """Why nothing was drawn."""

    NOT_FINITE = "NaN or +inf among the logits, or no finite one"
    ALL_EXCLUDED = "what the sample asks for leaves no token"


class Sampler:
    """Draws tokens from float32 logits of `vocab_size` ids."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._group_rows = max(1, _GROUP_ELEMENTS // vocab_size)

    def draw(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[int | NoToken]:
        """One token id for each draw, or why there is none.

        Args:
            logits: [num_logits, vocab_size], left as they are.
            draws: any number for any row; the history of their samples holds no PREVIOUS.
        """
        tokens: list[int | None] = [None] * len(draws)
        dice = uniforms(
            [draw.sample.seed for draw in draws],
            [draw.sample.index for draw in draws],
            [draw.position for draw in draws],
        )
        greedy = [i for i, draw in enumerate(draws) if draw.params.temperature == 0]
        bare = [i for i in greedy if not is_adjusted(draws[i].sample)]
        ordered = [i for i, draw in enumerate(draws) if self._needs_order(draw.params)]
        plain = sorted({*range(len(draws))} - {*greedy} - {*ordered})
        with np.errstate(over="ignore", invalid="ignore"):
            best = _greedy(logits) if bare else []
            for i in bare:
                tokens[i] = best[draws[i].row]
            for i in sorted({*greedy} - {*bare}):
                tokens[i] = _greedy(_rows(logits, [draws[i]]))[0]
            for group in self._groups(plain):
                members = [draws[i] for i in group]
                drawn = _draw_plain(_rows(logits, members), members, dice[group])
                for i, token in zip(group, drawn, strict=True):
                    tokens[i] = token
            for i in ordered:
                row = _rows(logits, [draws[i]])[0]
                tokens[i] = _draw_ordered(row, draws[i].params, float(dice[i]))
        return [
            _why(logits[draw.row]) if token is None else token
            for draw, token in zip(draws, tokens, strict=True)
        ]

    def _needs_order(self, params: DrawParams) -> bool:
        has_top = params.top_p < 1 or 0 < params.top_k < self._vocab_size
        return has_top and params.temperature > 0

    def _groups(self, indexes: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(indexes), self._group_rows):
            yield indexes[start : start + self._group_rows]


def _rows(logits: NDArray[np.float32], draws: list[Draw]) -> NDArray[np.float32]:
    """[len(draws), vocab_size]: a copy of each draw's logits, adjusted as its sample asks."""
    rows = logits[[draw.row for draw in draws]]
    for row, draw in zip(rows, draws, strict=True):
        if is_adjusted(draw.sample):
            if is_usable(row):
                adjust(row, draw.sample)
            else:  # a NaN must not hide among what is excluded
                row.fill(np.nan)
    return rows


def _why(row: NDArray[np.float32]) -> NoToken:
    """Why nothing was drawn from a row, [vocab_size], of the logits as they came."""
    return NoToken.ALL_EXCLUDED if is_usable(row) else NoToken.NOT_FINITE


def kept_ids(logits: NDArray[np.float32], params: DrawParams) -> NDArray[np.int64]:
    """The ids that top-k, top-p and min-p leave of one row, smallest first.

    Args:
        logits: [vocab_size], finite or -inf, at least one finite.
        params: with temperature > 0.
    """
    x = _scaled(logits, logits.max(), params.temperature)
    top_k = params.top_k if 0 < params.top_k < len(logits) else 0
    total = 0.0 if top_k else float(np.exp(x).sum(dtype=np.float64))
    for depth in _DEPTHS:
        ids = np.flatnonzero(x >= -depth)
        weights = np.exp(x[ids]).astype(np.float64)
        if top_k and len(ids) >= top_k:
            break
        if not top_k and params.top_p < 1 and weights.sum() >= params.top_p * total:
            break
    if top_k:
        first = _first(logits[ids], np.ones(len(ids)), top_k)
        ids, weights = ids[first], weights[first]
        total = float(weights.sum())
    if params.top_p < 1:
        first = _first(logits[ids], weights, params.top_p * total)
        ids, weights = ids[first], weights[first]
    return ids[weights >= np.float32(params.min_p)]


def _first(
    values: NDArray[np.float32], weights: NDArray[np.float64], target: float
) -> NDArray[np.int64]:
    """The fewest greatest values whose weights sum up to `target`, as ascending indices.

    Of equal values the one with the smaller index comes first. Many values are put into bins, by
    value, so that only the bin in which the sum reaches the target has to be sorted.
    """
    greatest, spread = values.max(), np.ptp(values)
    is_edge = np.ones(len(values), bool)
    is_sure = ~is_edge
    if len(values) > _SORTED_AT_ONCE and spread > 0:
        bins = ((greatest - values) * (_BINS / spread)).astype(np.int64)
        mass = np.cumsum(np.bincount(bins, weights))
        crossing = np.searchsorted(mass, target)
        is_sure, is_edge = bins < crossing, bins == crossing
        target -= mass[crossing - 1] if crossing else 0.0
    edge = np.flatnonzero(is_edge)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(weights[edge]), target)) + 1
    is_sure[edge[:enough]] = True
    return np.flatnonzero(is_sure)


def _greedy(rows: NDArray[np.float32]) -> list[int | None]:
    best = rows.argmax(axis=1)  # the first of equals; a NaN counts as greatest
    usable = np.isfinite(rows[np.arange(len(rows)), best])
    return [int(token) if ok else None for token, ok in zip(best, usable, strict=True)]


def _draw_ordered(row: NDArray[np.float32], params: DrawParams, die: float) -> int | None:
    """Draw from one row, [vocab_size], with top-k or top-p."""
    peak = row.max()
    if not np.isfinite(peak):
        return None
    ids = kept_ids(row, params)
    mass = np.cumsum(np.exp(_scaled(row[ids], peak, params.temperature)), dtype=np.float64)
    return int(ids[np.searchsorted(mass, die * mass[-1], side="right")])


def _draw_plain(
    rows: NDArray[np.float32], draws: list[Draw], dice: NDArray[np.float64]
) -> list[int | None]:
    """Draw from each row, [n, vocab_size], with no more than a temperature and min-p."""
    num_rows, vocab_size = rows.shape
    peaks = rows.max(axis=1)
    usable = np.isfinite(peaks)
    rows[~usable] = peaks[~usable] = 0  # drawn like the others, and thrown away
    temperatures = np.array([draw.params.temperature for draw in draws])
    weights = np.exp(_scaled(rows, peaks[:, None], temperatures[:, None]))
    min_p = np.array([draw.params.min_p for draw in draws], np.float32)
    if min_p.any():
        weights *= weights >= min_p[:, None]

    chunks = np.arange(0, vocab_size, _CHUNK)
    mass = np.cumsum(np.add.reduceat(weights, chunks, axis=1, dtype=np.float64), axis=1)
    targets = dice * mass[:, -1]  # below the total, as a die is below 1
    chosen = (mass <= targets[:, None]).sum(axis=1)
    every = np.arange(num_rows)
    targets -= np.where(chosen > 0, mass[every, chosen - 1], 0)

    ids = chunks[chosen, None] + np.arange(_CHUNK)
    inner = weights[every[:, None], np.minimum(ids, vocab_size - 1)] * (ids < vocab_size)
    mass = np.cumsum(inner, axis=1, dtype=np.float64)
    # Two ways to add the same numbers may differ in the last bit: stay inside the chunk.
    targets = np.minimum(targets, np.nextafter(mass[:, -1], 0))
    tokens = chunks[chosen] + (mass <= targets[:, None]).sum(axis=1)
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
