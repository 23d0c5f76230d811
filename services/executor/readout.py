"""What the rows of a plan get out of their logits: tokens, log-probabilities, or an error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.executor.logprobs import Ask
from services.executor.sampler import Draw, NoToken, Sampler
from shared.errors import ErrorCode
from shared.ids import SequenceId
from shared.messages import PREVIOUS, Row, RowError, Sample, Sampled, Scored

NOT_FINITE: Final = "its logits are not finite"
_ALL_EXCLUDED: Final = (
    "no token is left to draw: logit_bias, allowed_token_ids, bad_words and the stop tokens that "
    "min_tokens forbids exclude all of them"
)


@dataclass(frozen=True, slots=True)
class Readout:
    """The outcome of a plan's rows; of a row that failed, nothing but its error."""

    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...]
    errors: tuple[RowError, ...]


def read_out(
    sampler: Sampler,
    rows: Sequence[Row],
    logits: NDArray[np.float32],
    previous: Mapping[SequenceId, int],
) -> Readout:
    """Draw or report all samples and score all that is to be scored.

    Args:
        sampler: of the model's vocabulary.
        rows: each with all its logits.
        logits: [num_logits, vocab_size], in the order of `batch.logit_tokens`.
        previous: what each sequence drew in the step before, for histories that say PREVIOUS.
    """
    sampling = [row for row in rows if row.samples]
    errors: dict[SequenceId, RowError] = {}
    scored = list(_scores(sampler, rows, logits[len(sampling) :], errors))
    draws = [
        Draw(index, row.first_position + len(row.token_ids), _told(row, sample, previous))
        for index, row in enumerate(sampling)
        for sample in row.samples
    ]
    sampled = list(_samples(sampler, sampling, logits[: len(sampling)], draws, errors))
    return Readout(
        sampled=tuple([made for name, made in sampled if name not in errors]),
        scored=tuple([made for made in scored if made.sequence_id not in errors]),
        errors=tuple([errors[row.sequence_id] for row in rows if row.sequence_id in errors]),
    )


def _told(row: Row, sample: Sample, previous: Mapping[SequenceId, int]) -> Sample:
    """The sample with PREVIOUS in its history replaced by the token it stands for."""
    if not sample.history or sample.history[-1] != PREVIOUS:
        return sample
    return replace(sample, history=(*sample.history[:-1], previous[row.sequence_id]))


def _samples(
    sampler: Sampler,
    sampling: Sequence[Row],
    logits: NDArray[np.float32],
    draws: Sequence[Draw],
    errors: dict[SequenceId, RowError],
) -> Iterator[tuple[SequenceId, Sampled]]:
    """Each sample's outcome, with the name of its row; failed rows go into `errors`."""
    drawn = iter(sampler.draw(logits, [draw for draw in draws if draw.sample.draw is not None]))
    tokens = [None if draw.sample.draw is None else next(drawn) for draw in draws]
    asks = [_ask(logits[draw.row], draw, token) for draw, token in zip(draws, tokens, strict=True)]
    answers = iter(sampler.tell([ask for ask in asks if ask is not None]))
    for draw, token, ask in zip(draws, tokens, asks, strict=True):
        name, sample = sampling[draw.row].sequence_id, draw.sample
        told = None if ask is None else next(answers)
        if token is NoToken.NOT_FINITE or (ask is not None and told is None):
            errors[name] = RowError(name, NOT_FINITE)
        elif token is NoToken.ALL_EXCLUDED:
            errors.setdefault(name, RowError(name, _ALL_EXCLUDED, ErrorCode.INVALID))
        else:
            yield name, Sampled(sample.sequence_id, token, told)


def _ask(row: NDArray[np.float32], draw: Draw, token: int | NoToken | None) -> Ask | None:
    """What is to be told of a row, [vocab_size], once it is drawn from."""
    if isinstance(token, NoToken) or (token is not None and draw.sample.num_top is None):
        return None
    return Ask(row, token, draw.sample.num_top or int(token is None))


def _scores(
    sampler: Sampler,
    rows: Sequence[Row],
    logits: NDArray[np.float32],
    errors: dict[SequenceId, RowError],
) -> Iterator[Scored]:
    """Each row's score, from [num_scored, vocab_size] logits; failed rows go into `errors`."""
    scores = [(row.sequence_id, row.score) for row in rows if row.score is not None]
    wanted = [(token_id, score.num_top) for _, score in scores for token_id in score.token_ids]
    asks = [Ask(place, *each) for place, each in zip(logits, wanted, strict=True)]
    answers = sampler.tell(asks)
    start = 0
    for name, score in scores:
        told = answers[start : (start := start + len(score.token_ids))]
        if None in told:
            errors[name] = RowError(name, NOT_FINITE)
        else:
            yield Scored(name, score.first_position, tuple([each for each in told if each]))
