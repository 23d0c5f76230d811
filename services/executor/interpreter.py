"""Runs plans: swap out -> swap in -> copy -> forward -> sample, each plan complete in itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.executor.host_runner import HostRunner
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.plan_check import BadPlan, LastStep, PlanLimits, check_plan
from services.executor.runner import Launched, Runner
from services.executor.sampler import Drawing
from shared.errors import InvariantBroken
from shared.ids import SequenceId
from shared.messages import PREVIOUS, StepFailed, StepPlan, StepResult

Failure = Callable[[StepPlan, Exception], None]
"""Told of each plan that fails: BadPlan if it was refused, else whatever went wrong."""


@dataclass(slots=True)
class Pending:
    """A plan that was launched; `failed` says that it came to nothing."""

    plan: StepPlan
    launched: Launched | None = None
    failed: StepFailed | None = None
    before: "Pending | None" = None

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return self.launched is None or self.launched.is_done()


class Interpreter:
    """The hands: carries out one plan after the other and remembers no request.

    All it keeps are the pools and what the last plan drew, for rows that say PREVIOUS. `launch`
    begins a plan, `finish` waits for it, in the order of launching; between them the next plan
    may be launched, but no third.
    """

    def __init__(
        self,
        model: DecoderModel,
        pools: KVPools,
        max_model_len: int,
        drawing: Drawing | None = None,
        on_failure: Failure = lambda plan, error: None,
        runner: Runner | None = None,
    ) -> None:
        """`drawing` draws tokens, NumPy if it is None; `on_failure` hears why plans fail.

        `runner` carries plans out; the CPU, with `model`, `pools` and `drawing`, if it is None.
        """
        self._runner = runner or HostRunner(model, pools, drawing)
        self._on_failure = on_failure
        self._limits = PlanLimits(
            num_gpu_blocks=pools.num_gpu_blocks,
            num_cpu_blocks=pools.num_cpu_blocks,
            block_size=pools.block_size,
            max_model_len=max_model_len,
            vocab_size=model.shape.vocab_size,
        )
        self._last: LastStep | None = None
        self._pending: Pending | None = None

    def forget(self) -> None:
        """Start over with a new scheduler: its steps count from anywhere, nothing was drawn."""
        self._last = None
        self._pending = None

    def run(self, plan: StepPlan) -> StepResult | StepFailed:
        """Carry out one plan, whole.

        A plan that breaks a law changes nothing. If something unforeseen goes wrong half-way, the
        blocks this plan writes are in an unknown state, and the next plan may not say PREVIOUS.
        """
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a plan; one that fails already is a `Pending` too."""
        try:
            flat = check_plan(plan, self._limits, self._last)
        except BadPlan as error:
            return Pending(plan, failed=self._failed(plan, error))
        before, self._pending = self._pending, None
        self._last = LastStep(plan.step_id)
        try:
            launched = self._runner.launch(plan, flat, before.launched if before else None)
        except torch.AcceleratorError:
            raise  # the GPU is lost to this process: the next one has it again
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler hears of it
            return Pending(plan, failed=self._failed(plan, error))
        goes_on = any(row.token_ids[-1] == PREVIOUS for row in plan.rows)
        self._last = LastStep(plan.step_id, _drawing(plan))
        self._pending = Pending(plan, launched, before=before if goes_on else None)
        return self._pending

    def finish(self, pending: Pending) -> StepResult | StepFailed:
        """Wait for a plan. What went on from a plan that failed meanwhile fails too."""
        if pending.failed is None:
            try:
                return self._finish(pending)
            except torch.AcceleratorError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                pending.failed = self._failed(pending.plan, error)
                if self._pending is pending:
                    self._last, self._pending = LastStep(pending.plan.step_id), None
        return pending.failed

    def _finish(self, pending: Pending) -> StepResult:
        before, pending.before = pending.before, None
        if pending.launched is None:
            raise InvariantBroken(f"step {pending.plan.step_id} neither failed nor was launched")
        result = pending.launched.finish()
        if before is not None and before.failed is not None:
            first = next(row for row in pending.plan.rows if row.token_ids[-1] == PREVIOUS)
            raise BadPlan(
                f"row of sequence {first.sequence_id}: PREVIOUS, but step {before.plan.step_id} "
                "drew nothing for it"
            )
        return result

    def _failed(self, plan: StepPlan, error: Exception) -> StepFailed:
        self._on_failure(plan, error)
        kind = "bad plan" if isinstance(error, BadPlan) else type(error).__name__
        return StepFailed(plan.boot, plan.step_id, f"{kind}: {error}")


def _drawing(plan: StepPlan) -> frozenset[SequenceId]:
    """The sequences of the plan that draw.

    One whose sample only reports is not among them: nothing may go on from it.
    """
    return frozenset(
        sample.sequence_id for row in plan.rows for sample in row.samples if sample.draw is not None
    )
