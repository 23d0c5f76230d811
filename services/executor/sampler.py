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
What is kept is laid out by token id, and the uniform number falls on one of them.

A token's mass is its probability by the first one's, as a whole number of units. There are so many
units (2^35 for a vocabulary of 49,152) that no total is above 2^51: whole numbers of float64, whose
sums are exact in any order. So it does not matter how the tokens that are kept were found, and
C++ (native_drawing.py) and NumPy (numpy_drawing.py) draw the same. A token of less than half a unit
is never drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from services.executor.adjustment import adjust, is_adjusted
from services.executor.logprobs import is_usable
from services.executor.numpy_drawing import NumpyDrawing
from services.executor.philox import uniforms
from shared.errors import InvariantBroken
from shared.messages import Sample
from shared.sampling import DrawParams

_AT_ONCE: Final = 64
"""Most rows of which there are adjusted copies at one time."""


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


class Drawing(Protocol):
    """What draws, once the logits are adjusted and the dice are thrown."""

    def draw(
        self,
        rows: Sequence[NDArray[np.float32]],
        wishes: Sequence[DrawParams],
        dice: NDArray[np.float64],
    ) -> list[int | None]:
        """One token id for each row, or None if the row is no distribution.

        Args:
            rows: [n] of [vocab_size], contiguous, left as they are.
            wishes: [n], of which only temperature, top_k, top_p and min_p count.
            dice: [n], each in [0, 1).
        """


class Sampler:
    """Draws tokens from float32 logits."""

    def __init__(self, drawing: Drawing | None = None) -> None:
        """NumPy draws if `drawing` is None."""
        self._drawing = drawing or NumpyDrawing()

    def draw(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[int | NoToken]:
        """One token id for each draw, or why there is none.

        Args:
            logits: [num_logits, vocab_size], left as they are.
            draws: any number for any row; the history of their samples holds no PREVIOUS.
        """
        return [
            _why(logits[draw.row]) if token is None else token
            for draw, token in zip(draws, self._tokens(logits, draws), strict=True)
        ]

    def _tokens(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> Iterator[int | None]:
        dice = _dice(draws)
        for start in range(0, len(draws), _AT_ONCE):
            group = draws[start : start + _AT_ONCE]
            rows = [_row(logits, draw) for draw in group]
            wishes = [draw.params for draw in group]
            yield from self._drawing.draw(rows, wishes, dice[start : start + _AT_ONCE])


def _dice(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """[n] a number in [0, 1) for each draw; not thrown where all are greedy and nobody looks."""
    if not any(draw.params.temperature for draw in draws):
        return np.zeros(len(draws))
    return uniforms(
        [draw.sample.seed for draw in draws],
        [draw.sample.index for draw in draws],
        [draw.position for draw in draws],
    )


def _row(logits: NDArray[np.float32], draw: Draw) -> NDArray[np.float32]:
    """[vocab_size]: the draw's logits; if its sample adjusts them a copy, adjusted."""
    row: NDArray[np.float32] = logits[draw.row]
    if not is_adjusted(draw.sample):
        return row
    if not is_usable(row):  # a NaN must not hide among what is excluded
        return np.full_like(row, np.nan)
    row = row.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        adjust(row, draw.sample)
    return row


def _why(row: NDArray[np.float32]) -> NoToken:
    """Why nothing was drawn from a row, [vocab_size], of the logits as they came."""
    return NoToken.ALL_EXCLUDED if is_usable(row) else NoToken.NOT_FINITE
