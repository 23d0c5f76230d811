"""What happened so far, as numbers that only grow. Gauges are never counted: see machine.py."""

from collections import Counter
from dataclasses import dataclass, field

from shared.messages import PreemptionMode
from shared.sampling import FinishReason


def _no_seconds() -> dict[PreemptionMode, float]:
    return dict.fromkeys(PreemptionMode, 0.0)


@dataclass(slots=True)
class Counters:
    """Totals of one scheduler life.

    Attributes:
        requests_refused: by their ErrorCode.
        requests_finished: by the reason of their last sequence; ABORT is a client that went away.
        prompt_tokens: of prompts computed to their end, each once however often it was recomputed.
        computed_tokens: places assigned by plans sent, recomputed ones included.
        results_dropped: step results of no plan in flight.
        swap_fallbacks: requests that were to be swapped and were recomputed: the CPU pool had no
            room for them, or, once they were there, the KV pool had none to take them back.
        swap_out_blocks, swap_in_blocks, cow_copies: whole blocks copied by plans sent.
        prefix_cache_queries: tokens of requests that were looked up at their first start.
        prefix_cache_hits: how many of them were there.
        preemption_estimated_s: seconds that giving way was expected to cost, where that is known.
        preemption_actual_s: seconds that moves and recomputed tokens took.
        pins_taken: prefixes that were pinned; refused ones by their ErrorCode.
        pins_dropped: prefixes that could not be computed, or kept when an executor came back.
        pin_hits: requests whose first start found tokens of a pinned prefix.
        reports_ignored: parts of a result about sequences that had no row in its plan.
        deadlines_passed: requests that were ended, or refused before a model was known, for it.
        streams_attached: streams that a gateway took over, to go on with them.
        streams_orphaned: streams whose gateway was lost, and that are kept for another.
        streams_expired: streams that nobody came back for in their time to live.
        streams_evicted: streams dropped before that, as there were too many, or too large ones.
        resent_runs: runs of tokens, or `Finished`, sent again because a gateway missed them.
    """

    requests_accepted: int = 0
    requests_refused: Counter[str] = field(default_factory=Counter)
    requests_finished: Counter[FinishReason] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    preemptions: Counter[PreemptionMode] = field(default_factory=Counter)
    swap_fallbacks: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    cow_copies: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemption_estimated_s: dict[PreemptionMode, float] = field(default_factory=_no_seconds)
    preemption_actual_s: dict[PreemptionMode, float] = field(default_factory=_no_seconds)
    pins_taken: int = 0
    pins_refused: Counter[str] = field(default_factory=Counter)
    pins_dropped: int = 0
    pin_hits: int = 0
    plans_sent: int = 0
    plans_finished: int = 0
    plans_refused: int = 0
    plans_lost: int = 0
    row_errors: int = 0
    results_dropped: int = 0
    reports_ignored: int = 0
    executor_losses: int = 0
    deadlines_passed: int = 0
    streams_attached: int = 0
    streams_orphaned: int = 0
    streams_expired: int = 0
    streams_evicted: int = 0
    resent_runs: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Tokens found in the prefix cache as a share of those looked up, 0 to 1."""
        queries = self.prefix_cache_queries
        return self.prefix_cache_hits / queries if queries else 0.0

    def tokens(self) -> tuple[int, int]:
        """(prompt tokens, generated tokens) so far: two of them make a throughput."""
        return self.prompt_tokens, self.generation_tokens
