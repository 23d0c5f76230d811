"""Runs plans: swap out -> swap in -> copy -> forward -> sample, each plan complete in itself."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor.batch import FlatRows, flatten, logit_tokens, pack
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.plan_check import BadPlan, LastStep, PlanLimits, check_plan
from services.executor.readout import read_out
from services.executor.sampler import Drawing, Sampler
from shared.ids import SequenceId
from shared.messages import (
    PREVIOUS,
    Row,
    RowError,
    StepFailed,
    StepPlan,
    StepResult,
    StepTimings,
)

Failure = Callable[[StepPlan, Exception], None]
"""Told of each plan that fails: BadPlan if it was refused, else whatever went wrong."""


class Interpreter:
    """The hands: carries out one plan after the other and remembers no request.

    All it keeps are the pools and what the last plan drew, for rows that say PREVIOUS.
    """

    def __init__(
        self,
        model: DecoderModel,
        pools: KVPools,
        max_model_len: int,
        drawing: Drawing | None = None,
        on_failure: Failure = lambda plan, error: None,
    ) -> None:
        """`drawing` draws tokens, NumPy if it is None; `on_failure` hears why plans fail."""
        self._model = model
        self._pools = pools
        self._sampler = Sampler(drawing)
        self._on_failure = on_failure
        self._limits = PlanLimits(
            num_gpu_blocks=pools.num_gpu_blocks,
            num_cpu_blocks=pools.num_cpu_blocks,
            block_size=pools.block_size,
            max_model_len=max_model_len,
            vocab_size=model.shape.vocab_size,
        )
        self._last: LastStep | None = None

    def forget(self) -> None:
        """Start over with a new scheduler: its steps count from anywhere, nothing was drawn."""
        self._last = None

    def run(self, plan: StepPlan) -> StepResult | StepFailed:
        """Carry out one plan.

        A plan that breaks a law changes nothing. If something unforeseen goes wrong half-way, the
        blocks this plan writes are in an unknown state, and the next plan may not say PREVIOUS.
        """
        try:
            flat = check_plan(plan, self._limits, self._last)
        except BadPlan as error:
            self._on_failure(plan, error)
            return StepFailed(plan.boot, plan.step_id, f"bad plan: {error}")
        outcomes = self._last.tokens if self._last else {}
        previous = {name: token for name, token in outcomes.items() if token is not None}
        self._last = LastStep(plan.step_id)
        try:
            result = self._carry_out(plan, flat, previous)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler hears of it
            self._on_failure(plan, error)
            return StepFailed(plan.boot, plan.step_id, f"{type(error).__name__}: {error}")
        self._last = LastStep(plan.step_id, _outcomes(plan, result))
        return result

    def _carry_out(
        self, plan: StepPlan, flat: FlatRows, previous: dict[SequenceId, int]
    ) -> StepResult:
        clock = [time.perf_counter()]
        self._pools.swap_out(plan.swap_out)
        self._pools.swap_in(plan.swap_in)
        clock.append(time.perf_counter())
        self._pools.copy(plan.copies)
        clock.append(time.perf_counter())
        rows, lost = _split_lost(plan.rows, previous)
        if lost:
            flat = flatten(rows)
        logits = self._forward(rows, flat, previous)
        clock.append(time.perf_counter())
        made = read_out(self._sampler, rows, logits, previous)
        clock.append(time.perf_counter())
        swap_s, copy_s, forward_s, sample_s = (b - a for a, b in pairwise(clock))
        return StepResult(
            boot=plan.boot,
            step_id=plan.step_id,
            sampled=made.sampled,
            row_errors=(
                *(RowError(row.sequence_id, "its token of the step before failed") for row in lost),
                *made.errors,
            ),
            scored=made.scored,
            timings=StepTimings(swap_s, copy_s, forward_s, sample_s),
        )

    def _forward(
        self, rows: Sequence[Row], flat: FlatRows, previous: dict[SequenceId, int]
    ) -> NDArray[np.float32]:
        """[num_logits, vocab_size]: all that the rows ask for, in the order of `logit_tokens`."""
        if not rows:
            return np.zeros((0, self._limits.vocab_size), np.float32)
        token_ids = _resolved(rows, flat, previous)
        batch = pack(flat, token_ids, logit_tokens(rows, flat), self._pools.block_size)
        with torch.inference_mode():
            logits = self._model.forward(self._pools.gpu, batch)
        return logits.to("cpu", torch.float32).numpy()


def _outcomes(plan: StepPlan, result: StepResult) -> dict[SequenceId, int | None]:
    """What each sequence of the plan drew; None where it should have drawn and could not.

    A sequence whose sample only reports is not among them: nothing may go on from it.
    """
    drawn = {sampled.sequence_id: sampled.token_id for sampled in result.sampled}
    return {
        sample.sequence_id: drawn.get(sample.sequence_id)
        for row in plan.rows
        for sample in row.samples
        if sample.draw is not None
    }


def _split_lost(
    rows: Sequence[Row], previous: dict[SequenceId, int]
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
    rows: Sequence[Row], flat: FlatRows, previous: dict[SequenceId, int]
) -> NDArray[np.int64]:
    """[num_tokens] token ids, each PREVIOUS replaced by what its sequence drew."""
    token_ids = flat.token_ids.copy()
    is_previous = [row.token_ids[-1] == PREVIOUS for row in rows]
    drawn = [previous[row.sequence_id] for row, asks in zip(rows, is_previous, strict=True) if asks]
    token_ids[flat.row_starts[1:][is_previous] - 1] = np.array(drawn, np.int64)
    return token_ids
