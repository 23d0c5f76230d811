"""The numbers of a whole run, under the names that `vllm bench serve` gives them."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.bench.outcome import Failed, Outcome

METRICS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. Throughputs are per second of `duration_s`, which is the whole run's."""

    duration_s: float
    completed: int
    failed: int
    unfinished: int
    errors: Mapping[str, int]
    first_error: str | None
    prompt_tokens: int
    output_tokens: int
    of_asked_length: int
    tokens_per_event: float
    counted_by: Mapping[str, int]
    peak_concurrency: int
    peak_output_tokens_s: float
    good: int | None
    normalized_s: float | None
    samples_s: Mapping[str, Sequence[float]]
    """Of each of METRICS."""

    def per_s(self, count: float) -> float:
        """So many a second of the run."""
        return count / self.duration_s if self.duration_s > 0 else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default.

    >>> percentile([1.0, 2.0, 4.0], 75)
    3.0
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(
    outcomes: Iterable[Outcome | Failed],
    *,
    duration_s: float,
    unfinished: int,
    goodput_s: Mapping[str, float],
) -> Report:
    """Add up a run. `goodput_s`: limits of ttft, tpot, e2el; empty if nobody asked."""
    outcomes = list(outcomes)
    done = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    output_tokens = sum(outcome.output_tokens for outcome in done)
    num_events = sum(len(outcome.events_s) for outcome in done)
    return Report(
        duration_s=duration_s,
        completed=len(done),
        failed=len(failed),
        unfinished=unfinished,
        errors=dict(Counter(failure.kind for failure in failed).most_common()),
        first_error=next((f"{failure.kind}: {failure.story}" for failure in failed), None),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in done),
        output_tokens=output_tokens,
        of_asked_length=sum(outcome.is_of_asked_length for outcome in done),
        tokens_per_event=output_tokens / num_events if num_events else 0.0,
        counted_by=dict(Counter(outcome.counted_by for outcome in done)),
        peak_concurrency=peak_concurrency([(o.start_s, o.end_s) for o in outcomes]),
        peak_output_tokens_s=_peak_output_tokens(done),
        good=sum(_is_good(outcome, goodput_s) for outcome in done) if goodput_s else None,
        normalized_s=statistics.fmean(o.normalized_s for o in done) if done else None,
        samples_s={
            "ttft": [outcome.ttft_s for outcome in done],
            "tpot": [tpot_s for outcome in done for tpot_s in outcome.tpots_s],
            "itl": [itl_s for outcome in done for itl_s in outcome.itls_s],
            "e2el": [outcome.e2el_s for outcome in done],
        },
    )


def peak_concurrency(spans: Iterable[tuple[float, float]]) -> int:
    """Most spans that overlap at one time; one that ends where another begins does not.

    >>> peak_concurrency([(0, 2), (1, 3), (2, 4)])
    2
    """
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _peak_output_tokens(done: Sequence[Outcome]) -> float:
    """Most tokens in one second, counted in whole seconds from the first request on."""
    origin_s = min((outcome.start_s for outcome in done), default=0.0)
    buckets: defaultdict[int, float] = defaultdict(float)
    for outcome in done:
        share = outcome.output_tokens / len(outcome.events_s)
        for time_s in outcome.events_s:
            buckets[int(time_s - origin_s)] += share
    return max(buckets.values(), default=0.0)


def _is_good(outcome: Outcome, goodput_s: Mapping[str, float]) -> bool:
    measured = {
        "ttft": outcome.ttft_s,
        "tpot": outcome.slowest_tpot_s,
        "e2el": outcome.e2el_s,
    }
    return all(measured[name] <= limit_s for name, limit_s in goodput_s.items())
