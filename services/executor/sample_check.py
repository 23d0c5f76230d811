"""What may be wrong with a row's samples and its score; of every plan, before it runs.

The row's own tokens and places are checked already (plan_check.py).
"""

import numpy as np

from shared.errors import RequestError
from shared.messages import PREVIOUS, Row, Sample, Score
from shared.sampling import (
    INT64,
    MAX_BEAM_TOP,
    MAX_BIAS,
    MAX_LOGPROBS,
    DrawParams,
    check_numbers,
    unknown_ids,
)


def wrong_with_sample(row: Row, sample: Sample, vocab_size: int) -> str | None:
    """Why this sample of `row` must not be drawn; None if it may."""
    if sample.draw is None:
        return _wrong_with_report(sample, vocab_size)
    if sample.seed not in INT64:
        return f"seed {sample.seed} is beyond 64 bits"
    if not 0 <= sample.index < 2**63:
        return f"index {sample.index} is negative or beyond 64 bits"
    if sample.num_top is not None and not 0 <= sample.num_top <= MAX_LOGPROBS:
        return f"num_top {sample.num_top} is not in 0..{MAX_LOGPROBS}"
    if unknown := unknown_ids(sample.banned_ids, vocab_size):
        return f"banned id {unknown[0]} is not in the vocabulary 0..{vocab_size - 1}"
    return _wrong_with_draw(sample.draw, vocab_size) or _wrong_with_history(
        row, sample, sample.draw, vocab_size
    )


def wrong_with_score(row: Row, score: Score, vocab_size: int) -> str | None:
    """Why the score of `row` must not be made; None if it may."""
    if not score.token_ids:
        return "it scores nothing"
    if not 0 <= score.num_top <= MAX_LOGPROBS:
        return f"num_top {score.num_top} is not in 0..{MAX_LOGPROBS}"
    first, end = score.first_position, score.first_position + len(score.token_ids)
    row_end = row.first_position + len(row.token_ids)
    if first < row.first_position or end > row_end:
        return f"positions {first}..{end - 1} are not all in {row.first_position}..{row_end - 1}"
    if unknown := unknown_ids(score.token_ids, vocab_size):
        return f"token id {unknown[0]} is not in the vocabulary 0..{vocab_size - 1}"
    return None


def _wrong_with_report(sample: Sample, vocab_size: int) -> str | None:
    """Where nothing is drawn there is nothing but a number of likeliest tokens to ask for."""
    most = min(MAX_BEAM_TOP, vocab_size)
    if sample.num_top is None or not 1 <= sample.num_top <= most:
        return f"it draws nothing, and num_top {sample.num_top} is not in 1..{most}"
    for name in ("index", "seed", "history", "num_prompt", "banned_ids"):
        if getattr(sample, name):
            return f"it draws nothing, and {name} is for draws"
    return None


def _wrong_with_history(row: Row, sample: Sample, draw: DrawParams, vocab_size: int) -> str | None:
    history, position = sample.history, row.first_position + len(row.token_ids)
    if not draw.needs_history:
        return "history that its draw does not need" if history or sample.num_prompt else None
    if len(history) != position:
        return f"history has {len(history)} tokens before position {position}"
    if not 1 <= sample.num_prompt <= position:
        return f"num_prompt {sample.num_prompt} is not in 1..{position}"
    # With this, PREVIOUS stands in both or in neither.
    if history[row.first_position :] != row.token_ids:
        return "history does not end with the row's tokens"
    try:
        ids = np.fromiter(history, np.int64, len(history))
    except OverflowError:
        return "a history id is beyond 64 bits"
    unknown = (ids < 0) | (ids >= vocab_size)
    unknown[-1] &= history[-1] != PREVIOUS
    if unknown.any():
        return f"history id {ids[unknown.argmax()]} is not in the vocabulary 0..{vocab_size - 1}"
    return None


def _wrong_with_draw(draw: DrawParams, vocab_size: int) -> str | None:
    """Every plan brings every draw anew: microseconds as a rule, 0.2 ms with lists at their limits.

    Of a bad word only the last token stands for a logit; the others are compared and no more.
    """
    try:
        check_numbers(draw)
    except RequestError as error:
        return error.message
    if not all(draw.bad_words):
        return "bad_words holds a word without tokens"
    biased = [token_id for token_id, _ in draw.logit_bias]
    if len(set(biased)) < len(biased):
        return "logit_bias names a token id twice"
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in draw.logit_bias):
        return f"a logit_bias is not from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    for name, token_ids in (
        ("logit_bias", biased),
        ("allowed_token_ids", draw.allowed_token_ids),
        ("bad_words", [word[-1] for word in draw.bad_words]),
    ):
        if unknown := unknown_ids(token_ids, vocab_size):
            return f"{name}: {unknown[0]} is not in the vocabulary 0..{vocab_size - 1}"
    return None
