"""Who draws for the rows of a plan: the device, or the CPU's sampler for what only that knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.executor.adjustment import is_adjusted
from shared.ids import SequenceId
from shared.messages import Row, Sample
from shared.sampling import DrawParams

_LOW: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of a plan, parted.

    Attributes:
        places: the device's draws: {sequence: which one}.
        draws: the same as arrays, as in `kernels.triton_gpu.sampling.Draws`.
        host_rows: those whose logits the CPU looks at, with all that they ask for.
        host_logits: [n] int64, which of the step's logits these are, in `read_out`'s order.
    """

    places: Mapping[SequenceId, int]
    draws: Mapping[str, NDArray[Any]]
    host_rows: tuple[Row, ...]
    host_logits: NDArray[np.int64]


def divide(rows: Sequence[Row], num_logits: int, vocab_size: int, most_draws: int) -> Division:
    """Part the rows.

    Args:
        rows: of a checked plan.
        num_logits: the step's, in the order of `batch.logit_tokens`.
        vocab_size: the model's.
        most_draws: a step with more is the CPU's.
    """
    sampling = [row for row in rows if row.samples]
    num_draws = sum(len(row.samples) for row in sampling)
    is_host = [num_draws > most_draws or not _is_plain(row) for row in sampling]
    drawn = [
        (number, row.first_position + len(row.token_ids), sample, sample.draw)
        for number, row in enumerate(sampling)
        if not is_host[number]
        for sample in row.samples
        if sample.draw is not None
    ]
    asks_host = {row.sequence_id for row, its in zip(sampling, is_host, strict=True) if its}
    return Division(
        places={sample.sequence_id: place for place, (_, _, sample, _) in enumerate(drawn)},
        draws=_arrays(drawn, vocab_size) if drawn else {},
        host_rows=tuple(
            row for row in rows if row.score is not None or row.sequence_id in asks_host
        ),
        host_logits=np.concatenate(
            (np.flatnonzero(is_host), np.arange(len(sampling), num_logits))
        ).astype(np.int64),
    )


def _is_plain(row: Row) -> bool:
    """Whether all that a row asks for are tokens drawn from its logits as they are."""
    return row.score is None and all(
        sample.draw is not None and sample.num_top is None and not is_adjusted(sample)
        for sample in row.samples
    )


def _arrays(
    drawn: Sequence[tuple[int, int, Sample, DrawParams]], vocab_size: int
) -> dict[str, NDArray[Any]]:
    numbers, positions, samples, params = zip(*drawn, strict=True)
    return {
        "rows": np.array(numbers, np.int32),
        "temperatures": np.array([one.temperature for one in params], np.float32),
        "top_ks": np.array([min(one.top_k, vocab_size) for one in params], np.int32),
        "top_ps": np.array([one.top_p for one in params], np.float64),
        "min_ps": np.array([one.min_p for one in params], np.float32),
        "seeds": _bits([sample.seed for sample in samples]),
        "indexes": _bits([sample.index for sample in samples]),
        "draw_positions": np.array(positions, np.int64),
    }


def _bits(numbers: Sequence[int]) -> NDArray[np.int64]:
    """Integers of 64 bits, signed or not, by their bits."""
    return np.array([number & _LOW for number in numbers], np.uint64).view(np.int64)
