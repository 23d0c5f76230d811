"""The scheduler's metrics, read off the core at the moment somebody looks.

Nothing is counted twice: gauges come from the allocator and the queues, totals from the core's own
counters (docs/protocol.md, law 8). Names follow vLLM's.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import ErrorCode
from shared.messages import PreemptionMode
from shared.metrics import PREFIX
from shared.sampling import FinishReason

if TYPE_CHECKING:
    from services.scheduler.server import SchedulerServer


class SchedulerCollector(Collector):
    """Yields every metric of one running scheduler."""

    def __init__(self, server: "SchedulerServer") -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """One sample of everything."""
        yield from self._gauges()
        yield from self._totals()

    def _gauges(self) -> Iterator[Metric]:
        server, core, usage = self._server, self._server.core, self._server.core.usage()
        yield _gauge("num_requests_running", "Requests that run", core.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait", core.num_waiting)
        yield _gauge("num_requests_queued", "Waiting for a first step", core.num_queued)
        yield _gauge("num_tokens_queued", "Prompt tokens of these", core.num_queued_tokens)
        yield _gauge("max_num_queued_reqs", "Most that may wait", core.config.max_num_queued_reqs)
        yield _gauge(
            "max_num_queued_tokens",
            "Most prompt tokens that may wait",
            core.config.max_num_queued_tokens,
        )
        yield _gauge("num_requests_swapped", "Requests in CPU memory", core.num_swapped)
        yield _gauge(
            "longest_wait_seconds",
            "Of who waits or is swapped",
            core.longest_wait_s(server.clock()),
        )
        yield _gauge("kv_cache_usage_perc", "Used blocks, 0 to 1", usage.used_share)
        yield _labelled(
            GaugeMetricFamily(PREFIX + "kv_blocks", "Blocks by state", labels=["state"]),
            {
                "free": usage.num_free,
                "used": usage.num_used,
                "shared": usage.num_shared,
                "cached": usage.num_cached,
                "pinned": core.num_pinned_blocks,
            },
        )
        yield _gauge(
            "kv_sharing_saved_ratio",
            "Blocks saved by sharing, as a share of those held without it, 0 to 1",
            usage.sharing_saved,
        )
        yield _gauge("num_pinned_prefixes", "Prefixes that are pinned", core.num_pins)
        yield _gauge("cpu_cache_usage_perc", "Used CPU blocks, 0 to 1", core.cpu_usage().used_share)
        yield _labelled(
            GaugeMetricFamily(PREFIX + "kv_places", "Token places by use", labels=["use"]),
            {
                "tokens": usage.tokens,
                "reserved": usage.reserved,
                "internal": usage.internal,
                "external": usage.external,
                "free": usage.num_free * usage.block_size,
                "cached": usage.num_cached * usage.block_size,
            },
        )
        yield _gauge("detached_streams", "Streams that nobody reads now", core.num_detached)
        yield _gauge("detached_stream_bytes", "About their memory", core.num_detached_bytes)
        yield _gauge("executor_up", "1 while an executor works", server.executor is not None)
        yield _gauge("gateways", "Gateways that are alive", len(server.gateways))

    def _totals(self) -> Iterator[Metric]:
        server, counters = self._server, self._server.core.counters
        yield _total("prompt_tokens", "Prompt tokens computed", counters.prompt_tokens)
        yield _total("generation_tokens", "Tokens generated", counters.generation_tokens)
        yield _total("computed_tokens", "Tokens computed, again included", counters.computed_tokens)
        yield _total("requests_accepted", "Requests taken", counters.requests_accepted)
        yield _labelled(
            CounterMetricFamily(
                PREFIX + "request_success", "Ended requests", labels=["finished_reason"]
            ),
            {reason: counters.requests_finished[reason] for reason in FinishReason},
        )
        yield _total(
            "requests_cancelled", "Clients gone", counters.requests_finished[FinishReason.ABORT]
        )
        yield _labelled(
            CounterMetricFamily(
                PREFIX + "requests_rejected", "Refused requests", labels=["reason"]
            ),
            {code: counters.requests_refused[code] for code in ErrorCode},
        )
        yield _total("deadlines_passed", "Ended for their deadline", counters.deadlines_passed)
        yield _labelled(
            CounterMetricFamily(PREFIX + "preemptions", "Requests that gave way", labels=["mode"]),
            {mode: counters.preemptions[mode] for mode in PreemptionMode},
        )
        for name, what, seconds in (
            ("estimated", "Seconds that giving way was to cost", counters.preemption_estimated_s),
            ("actual", "Seconds that giving way did cost", counters.preemption_actual_s),
        ):
            yield _labelled(
                CounterMetricFamily(f"{PREFIX}preemption_{name}_seconds", what, labels=["mode"]),
                {mode: seconds[mode] for mode in PreemptionMode},
            )
        yield _total("swap_fallbacks", "Recomputed, no room to swap", counters.swap_fallbacks)
        yield _total("swap_out_blocks", "Blocks moved to the CPU", counters.swap_out_blocks)
        yield _total("swap_in_blocks", "Blocks moved back", counters.swap_in_blocks)
        yield _total("cow_copies", "Shared blocks copied on write", counters.cow_copies)
        yield _total("prefix_cache_queries", "Tokens looked up", counters.prefix_cache_queries)
        yield _total("prefix_cache_hits", "Tokens found", counters.prefix_cache_hits)
        yield _total("prefix_cache_evictions", "Cached blocks lost", server.core.prefix_evictions)
        yield _total("pinned_prefixes_taken", "Prefixes pinned", counters.pins_taken)
        yield _labelled(
            CounterMetricFamily(
                PREFIX + "pinned_prefixes_refused", "Prefixes not pinned", labels=["reason"]
            ),
            counters.pins_refused,
        )
        yield _total("pinned_prefixes_dropped", "Pinned prefixes lost", counters.pins_dropped)
        yield _total("pinned_prefix_hits", "Requests that began with one", counters.pin_hits)
        yield _total("steps", "Plans run", counters.plans_finished)
        yield _labelled(
            CounterMetricFamily(
                PREFIX + "step_seconds", "Seconds from plan to result, by part", labels=["part"]
            ),
            server.step_seconds.by_part,
        )
        yield _total("steps_refused", "Plans the executor did not run", counters.plans_refused)
        yield _total("steps_lost", "Plans lost with an executor", counters.plans_lost)
        yield _total("results_dropped", "Results of no plan sent", counters.results_dropped)
        yield _total("reports_ignored", "Reports on no row of a plan", counters.reports_ignored)
        yield _total("row_errors", "Sequences that failed alone", counters.row_errors)
        yield _total("runs_resent", "Runs of tokens a gateway had missed", counters.resent_runs)
        yield _total("streams_attached", "Streams taken over", counters.streams_attached)
        yield _total("streams_orphaned", "Streams of lost gateways", counters.streams_orphaned)
        yield _total("streams_expired", "Streams nobody came for", counters.streams_expired)
        yield _total("streams_evicted", "Streams there was no room for", counters.streams_evicted)
        yield _total("executors_adopted", "Executors taken", server.executors_seen)
        yield _total("executor_restarts", "Executors lost", counters.executor_losses)
        yield _total("step_timeouts", "Of these, for a step that hung", server.overdue.timeouts)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, what, value=value)


def _total(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, what, value=value)


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Mapping[str, float]
) -> Metric:
    for label, value in samples.items():
        family.add_metric([str(label)], value)
    return family
