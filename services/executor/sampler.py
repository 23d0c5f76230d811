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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.executor.logprobs import Ask, is_usable
from services.executor.numpy_drawing import NumpyDrawing, wish_of
from services.executor.philox import uniforms
from shared.messages import PositionLogprobs, Sample
from shared.sampling import DrawParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One `Sample` to draw: from which row of the logits, for which place in its sequence."""

    row: int
    position: int
    sample: Sample

    @property
    def params(self) -> DrawParams:
        """How to draw. Raises: InvariantBroken if the sample draws nothing."""
        return wish_of(self.sample)


class NoToken(Enum):
    """Why nothing was drawn."""

    NOT_FINITE = "NaN or +inf among the logits, or no finite one"
    ALL_EXCLUDED = "what the sample asks for leaves no token"


class Drawing(Protocol):
    """What adjusts logits and draws from them once the dice are thrown, and tells what they say."""

    def draw(
        self,
        rows: Sequence[NDArray[np.float32]],
        samples: Sequence[Sample],
        dice: NDArray[np.float64],
    ) -> list[int | None]:
        """One token id for each row, or None if there is none to draw.

        Args:
            rows: [n] of [vocab_size], contiguous, left as they are.
            samples: [n], each with a `draw`.
            dice: [n], each in [0, 1).
        """

    def tell(self, asks: Sequence[Ask]) -> list[PositionLogprobs | None]:
        """The answer to each ask, or None if its row is no distribution.

        Args:
            asks: their rows all as long, contiguous.
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
        dice = _dice(draws)
        rows = [logits[draw.row] for draw in draws]
        tokens = self._drawing.draw(rows, [draw.sample for draw in draws], dice)
        return [
            _why(row) if token is None else token for row, token in zip(rows, tokens, strict=True)
        ]

    def tell(self, asks: Sequence[Ask]) -> list[PositionLogprobs | None]:
        """The answer to each ask, or None if its row is no distribution."""
        return self._drawing.tell(asks) if asks else []


def _dice(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """[n] a number in [0, 1) for each draw; not thrown where all are greedy and nobody looks."""
    if not any(draw.params.temperature for draw in draws):
        return np.zeros(len(draws))
    return uniforms(
        [draw.sample.seed for draw in draws],
        [draw.sample.index for draw in draws],
        [draw.position for draw in draws],
    )


def _why(row: NDArray[np.float32]) -> NoToken:
    """Why nothing was drawn from a row, [vocab_size], of the logits as they came."""
    return NoToken.ALL_EXCLUDED if is_usable(row) else NoToken.NOT_FINITE
