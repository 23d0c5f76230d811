"""What a request adds to, takes from and forbids in its logits before a token is drawn.

In this order, on a copy of the row: `logit_bias` is added; `repetition_penalty` divides positive
and multiplies negative logits of every token in prompt and answer; `frequency_penalty` is
subtracted for each time the answer holds a token and `presence_penalty` once; then what is not
among `allowed_token_ids`, would complete one of `bad_words`, or is among the sample's `banned_ids`
becomes -inf.

Sources: Keskar et al. 2019, "CTRL", section 4.1 (repetition, as transformers and vLLM have it);
OpenAI's API reference (frequency and presence: mu[j] - c[j] * a_frequency - [c[j] > 0] *
a_presence).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.ids import Ids
from shared.messages import Sample
from shared.sampling import DrawParams

_GREATEST: Final = np.float32(np.finfo(np.float32).max)
_TINY: Final = float(np.finfo(np.float32).tiny)


def is_adjusted(sample: Sample) -> bool:
    """Whether the sample's logits are not drawn from as they are."""
    draw = sample.draw
    return bool(sample.banned_ids) or (
        draw is not None
        and (bool(draw.logit_bias or draw.allowed_token_ids or draw.bad_words) or draw.has_penalty)
    )


def adjust(row: NDArray[np.float32], sample: Sample) -> None:
    """Apply all that the sample asks for, in place.

    Args:
        row: [vocab_size], finite or -inf; afterwards it may be -inf everywhere.
        sample: `history` holds no PREVIOUS.
    """
    draw = sample.draw
    if draw is not None:
        if draw.logit_bias:
            ids, biases = zip(*draw.logit_bias, strict=True)
            row[np.array(ids)] += np.array(biases, np.float32)
        if draw.has_penalty:
            _penalise(
                row,
                draw,
                np.fromiter(sample.history, np.int64, len(sample.history)),
                sample.num_prompt,
            )
        if draw.allowed_token_ids:
            allowed = np.array(draw.allowed_token_ids)
            kept = row[allowed]
            row.fill(-np.inf)
            row[allowed] = kept
        if draw.bad_words:
            row[completing(draw.bad_words, sample.history)] = -np.inf
    if sample.banned_ids:
        row[list(sample.banned_ids)] = -np.inf


def _penalise(
    row: NDArray[np.float32], draw: DrawParams, history: NDArray[np.int64], num_prompt: int
) -> None:
    """Lower what was said already. A token said twice is written twice, with the same number."""
    if draw.repetition_penalty != 1:
        penalty = np.float32(max(draw.repetition_penalty, _TINY))
        said = row[history]
        # A tiny penalty may carry a logit beyond float32: it is then as great as can be.
        row[history] = np.minimum(np.where(said < 0, said * penalty, said / penalty), _GREATEST)
    if draw.frequency_penalty != 0 or draw.presence_penalty != 0:
        answer = history[num_prompt:]
        counts = np.bincount(answer)[answer]
        row[answer] -= (counts * draw.frequency_penalty + draw.presence_penalty).astype(np.float32)


def completing(bad_words: tuple[Ids, ...], history: Ids) -> list[int]:
    """The last token of each word whose other tokens end the history."""
    return [word[-1] for word in bad_words if _ends_with(history, word[:-1])]


def _ends_with(history: Ids, beginning: Ids) -> bool:
    return not beginning or history[-len(beginning) :] == beginning
