"""Plans carried out by the CPU, at once: a plan that is launched is done."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from services.executor.batch import FlatRows, flatten, logit_tokens, pack
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.readout import read_out
from services.executor.runner import Launched
from services.executor.sampler import Drawing, Sampler
from shared.ids import SequenceId
from shared.messages import PREVIOUS, Row, RowError, StepPlan, StepResult, StepTimings

LOST = "its token of the step before failed"
"""Said of a row that goes on from a token that was never drawn."""


class Done:
    """A plan that was carried out."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        """It is."""
        return True

    def finish(self) -> StepResult:
        """What it made."""
        return self._result

    @property
    def tokens(self) -> Mapping[SequenceId, int]:
        """What was drawn."""
        return tokens_of(self._result)


class HostRunner:
    """Runs a model in main memory; all it keeps are the pools."""

    def __init__(self, model: DecoderModel, pools: KVPools, drawing: Drawing | None = None) -> None:
        """`drawing` draws tokens, NumPy if it is None."""
        self._model = model
        self._pools = pools
        self._sampler = Sampler(drawing)

    def launch(self, plan: StepPlan, flat: FlatRows, before: Launched | None) -> Launched:
        """Carry it out."""
        previous = before.tokens if before else {}
        clock = [time.perf_counter()]
        self._pools.swap_out(plan.swap_out)
        self._pools.swap_in(plan.swap_in)
        clock.append(time.perf_counter())
        self._pools.copy(plan.copies)
        clock.append(time.perf_counter())
        rows, lost = _split_lost(plan.rows, previous)
        if lost:
            flat = flatten(rows, flat.block_size)
        logits = self._forward(rows, flat, previous)
        clock.append(time.perf_counter())
        made = read_out(self._sampler, rows, logits, previous)
        clock.append(time.perf_counter())
        swap_s, copy_s, forward_s, sample_s = (b - a for a, b in pairwise(clock))
        return Done(
            StepResult(
                boot=plan.boot,
                step_id=plan.step_id,
                sampled=made.sampled,
                row_errors=(*(RowError(row.sequence_id, LOST) for row in lost), *made.errors),
                scored=made.scored,
                timings=StepTimings(swap_s, copy_s, forward_s, sample_s),
            )
        )

    def _forward(
        self, rows: Sequence[Row], flat: FlatRows, previous: Mapping[SequenceId, int]
    ) -> NDArray[np.float32]:
        """[num_logits, vocab_size]: all that the rows ask for, in the order of `logit_tokens`."""
        if not rows:
            return np.zeros((0, self._model.shape.vocab_size), np.float32)
        token_ids = _resolved(rows, flat, previous)
        batch = pack(flat, token_ids, logit_tokens(rows, flat))
        logits: NDArray[np.float32] = self._model.forward(self._pools.gpu, batch).numpy()
        return logits


def tokens_of(result: StepResult) -> dict[SequenceId, int]:
    """What each sequence drew. One whose sample only reports is not among them."""
    return {
        sampled.sequence_id: sampled.token_id
        for sampled in result.sampled
        if sampled.token_id is not None
    }


def _split_lost(
    rows: Sequence[Row], previous: Mapping[SequenceId, int]
) -> tuple[Sequence[Row], list[Row]]:
    """The rows that can run, and those that go on from a token that failed."""
    lost = [
        row for row in rows if row.token_ids[-1] == PREVIOUS and row.sequence_id not in previous
    ]
    if not lost:
        return rows, []
    names = {row.sequence_id for row in lost}
    return [row for row in rows if row.sequence_id not in names], lost


def _resolved(
    rows: Sequence[Row], flat: FlatRows, previous: Mapping[SequenceId, int]
) -> NDArray[np.int64]:
    """[num_tokens] token ids, each PREVIOUS replaced by what its sequence drew."""
    going_on = [index for index, row in enumerate(rows) if row.token_ids[-1] == PREVIOUS]
    if not going_on:
        return flat.token_ids
    token_ids = flat.token_ids.copy()
    token_ids[flat.row_starts[1:][going_on] - 1] = [
        previous[rows[index].sequence_id] for index in going_on
    ]
    return token_ids
