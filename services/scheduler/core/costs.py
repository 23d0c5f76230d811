"""What giving way costs on this machine: measured by the executor, corrected by every step.

No number of seconds is known here: all rates come from `ExecutorReady.costs` and from the timings
of results. A rate of 0 is not known, and what depends on it cannot be estimated.
"""

from dataclasses import dataclass
from typing import Final

from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan
from shared.messages import Costs, PreemptionMode, StepTimings

_MEMORY: Final = 0.9  # of the moving averages: how much of the old stays at each measurement


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that one victim's giving way will cost, by each way; None is not known."""

    swap_s: float | None
    recompute_s: float | None

    def of(self, mode: PreemptionMode) -> float | None:
        """Seconds of one mode."""
        return self.swap_s if mode is PreemptionMode.SWAP else self.recompute_s


class MachineCosts:
    """Two rates: of moving blocks between the pools, and of computing a prompt."""

    def __init__(self, costs: Costs, counters: Counters) -> None:
        self.block_bytes = costs.block_bytes
        self._counters = counters
        self.copy_bytes_per_s = costs.copy_bytes_per_s
        self.prefill_tokens_per_s = costs.prefill_tokens_per_s

    def estimate(self, num_blocks: int, num_tokens: int) -> Estimate:
        """Of `num_blocks` moved out and in again, or `num_tokens` computed again."""
        moved = 2 * num_blocks * self.block_bytes
        return Estimate(
            moved / self.copy_bytes_per_s if self.copy_bytes_per_s > 0 else None,
            num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else None,
        )

    def expected_s(self, sent: SentPlan) -> float:
        """Of a plan: its tokens and moves at the two rates; 0 of what is not known."""
        moved = (len(sent.plan.swap_out) + len(sent.plan.swap_in)) * self.block_bytes
        swap_s = moved / self.copy_bytes_per_s if self.copy_bytes_per_s > 0 else 0.0
        rate = self.prefill_tokens_per_s
        return swap_s + (sent.num_tokens / rate if rate > 0 else 0.0)

    def learn(self, sent: SentPlan, timings: StepTimings) -> None:
        """What a plan took. Only steps that are mostly prompts say what a prompt costs."""
        moves = len(sent.plan.swap_out) + len(sent.plan.swap_in)
        actual_s = self._counters.preemption_actual_s
        if moves and timings.swap_s > 0:
            rate = moves * self.block_bytes / timings.swap_s
            self.copy_bytes_per_s = _moved(self.copy_bytes_per_s, rate)
            actual_s[PreemptionMode.SWAP] += timings.swap_s
        if not timings.forward_s > 0:
            return
        if 2 * sent.num_prompt_tokens > sent.num_tokens:
            rate = sent.num_tokens / timings.forward_s
            self.prefill_tokens_per_s = _moved(self.prefill_tokens_per_s, rate)
        if sent.num_again:
            again_s = timings.forward_s * sent.num_again / sent.num_tokens
            actual_s[PreemptionMode.RECOMPUTE] += again_s


def _moved(average: float, measured: float) -> float:
    return _MEMORY * average + (1 - _MEMORY) * measured if average > 0 else measured
