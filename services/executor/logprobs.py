"""Log-probabilities of the raw distribution: what the model thinks, whatever the request wants.

A row's numbers are computed from that row alone. The exponentials are float32; their sum is one of
whole numbers of units, 2^46 for a vocabulary of 49,152 to a weight of 1, and so exact in any order:
C++ (native_drawing.py) and NumPy, here, tell the same bits. They are off by less than 1e-6, the
last bit of a logit.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.messages import PositionLogprobs

_BITS: Final = 62
"""A sum of weights is a whole number of at most so many bits."""
_CHUNK: Final = 256
"""The greatest logit of so many neighbours tells which of them may be among the best; of fewer,
where more are wanted than there would be chunks."""


def is_usable(row: NDArray[np.float32]) -> bool:
    """Whether a row, [vocab_size], is a distribution: no NaN, no +inf, not -inf everywhere."""
    return bool(np.isfinite(row.max()))


@dataclass(frozen=True, slots=True)
class Ask:
    """What to tell of a row: about `token_id`, or the likeliest if it is None, and the likeliest.

    Attributes:
        row: [vocab_size].
        token_id: in the vocabulary.
        num_top: 0 costs nothing; more than the vocabulary gives the whole of it.
    """

    row: NDArray[np.float32]
    token_id: int | None
    num_top: int


def answer(ask: Ask) -> PositionLogprobs:
    """What a row that is usable tells."""
    if ask.token_id is None:
        return likeliest(ask.row, ask.num_top)
    return raw_logprobs(ask.row, ask.token_id, ask.num_top)


def raw_logprobs(row: NDArray[np.float32], token_id: int, num_top: int) -> PositionLogprobs:
    """What `token_id` has for a log-probability and rank, and which are the `num_top` likeliest.

    Args: as of `Ask`; the row is usable.
    """
    top_ids = _best(row, num_top) if num_top else []
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return told(row, _log_total(row), token_id, rank, top_ids)


def likeliest(row: NDArray[np.float32], num_top: int) -> PositionLogprobs:
    """The `num_top` likeliest tokens, 1 at least, of a row where none is chosen.

    The first stands for the one that is chosen. The row is usable.
    """
    top_ids = _best(row, num_top)
    return told(row, _log_total(row), top_ids[0], 1, top_ids)


def told(
    row: NDArray[np.float32], log_total: float, chosen: int, rank: int, top_ids: list[int]
) -> PositionLogprobs:
    """The log-probabilities of tokens whose places are found: logits less `log_total`."""
    numbers = (row[[chosen, *top_ids]].astype(np.float64) - log_total).tolist()
    return PositionLogprobs(
        chosen=numbers[0], rank=rank, top_ids=tuple(top_ids), top=tuple(numbers[1:])
    )


def log_of_total(peak: float, total: int, vocab_size: int) -> float:
    """What to take from a logit to get its log-probability.

    Args:
        peak: the greatest logit.
        total: the weights of all, exp(logit - peak), in units.
    """
    return peak + math.log(total / units(vocab_size))


def units(vocab_size: int) -> int:
    """How many a weight of 1 has."""
    return 1 << (_BITS - (vocab_size - 1).bit_length())


def _log_total(row: NDArray[np.float32]) -> float:
    peak, size = row.max(), len(row)
    with np.errstate(over="ignore"):
        weights = row - peak
        np.exp(weights, out=weights)
    weights *= np.float32(units(size))
    return log_of_total(float(peak), int(weights.astype(np.int64).sum()), size)


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
