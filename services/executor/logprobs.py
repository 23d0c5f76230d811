"""Log-probabilities of the raw distribution: what the model thinks, whatever the request wants.

A row's numbers are computed from that row alone, so they are the same bits in any batch. The
exponentials are float32, their sum is float64: off by less than 1e-6, the last bit of a logit.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.messages import PositionLogprobs

_CHUNK: Final = 256
"""The greatest logit of so many neighbours tells which of them may be among the best; of fewer,
where more are wanted than there would be chunks."""


def is_usable(row: NDArray[np.float32]) -> bool:
    """Whether a row, [vocab_size], is a distribution: no NaN, no +inf, not -inf everywhere."""
    return bool(np.isfinite(row.max()))


def raw_logprobs(row: NDArray[np.float32], token_id: int, num_top: int) -> PositionLogprobs:
    """What `token_id` has for a log-probability and rank, and which are the `num_top` likeliest.

    Args:
        row: [vocab_size], usable.
        token_id: in the vocabulary.
        num_top: 0 costs nothing; more than the vocabulary gives the whole of it.
    """
    log_total = _log_total(row)
    top_ids = _best(row, num_top) if num_top else []
    return PositionLogprobs(
        chosen=float(row[token_id]) - log_total,
        rank=1 + int(np.count_nonzero(row > row[token_id])),
        top_ids=tuple(top_ids),
        top=tuple([float(row[best]) - log_total for best in top_ids]),
    )


def likeliest(row: NDArray[np.float32], num_top: int) -> PositionLogprobs:
    """The `num_top` likeliest tokens of a row where none is chosen: the first stands for it.

    Args:
        row: [vocab_size], usable.
        num_top: 1 at least; more than the vocabulary gives the whole of it.
    """
    log_total = _log_total(row)
    top_ids = _best(row, num_top)
    top = tuple([float(row[best]) - log_total for best in top_ids])
    return PositionLogprobs(chosen=top[0], rank=1, top_ids=tuple(top_ids), top=top)


def _log_total(row: NDArray[np.float32]) -> float:
    """What to take from a logit to get its log-probability."""
    peak = row.max()
    with np.errstate(over="ignore"):
        weights = row - peak
        np.exp(weights, out=weights)
    return float(peak) + float(np.log(weights.sum(dtype=np.float64)))


def _best(row: NDArray[np.float32], count: int) -> list[int]:
    """The `count` ids with the greatest logits, best first; of equals the smaller id first.

    Nobody sorts the vocabulary: at least `count` logits reach the `count`-th greatest of the
    chunks' greatest, and hardly more do.
    """
    count = min(count, len(row))
    chunk = min(_CHUNK, len(row) // count)
    greatest = np.maximum.reduceat(row, np.arange(0, len(row), chunk))
    ids = np.flatnonzero(row >= np.partition(greatest, -count)[-count])
    order = np.argsort(-row[ids], kind="stable")[:count]
    best: list[int] = ids[order].tolist()
    return best
