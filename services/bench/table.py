"""The report as the table that `vllm bench serve` prints, and as its JSON."""

import statistics
from collections.abc import Sequence

from services.bench.outcome import Failed, Outcome
from services.bench.plan import Json
from services.bench.recording import Recording
from services.bench.report import METRICS, Report, percentile

_WIDTH = 50
_COUNTED_BY = {"usage": "the server's usage", "tokenizer": "the tokenizer"}


def write_table(
    report: Report, metrics: Sequence[str], percentiles: Sequence[float], *, title: str
) -> str:
    """A report for people; times in milliseconds."""
    lines = [f"{f' {title} ':=^{_WIDTH}}", *_counts(report), *_rates(report)]
    for metric in metrics:
        values = report.samples_s[metric]
        lines.append(f"{METRICS[metric]:-^{_WIDTH}}")
        name = metric.upper()
        if not values:
            lines.append(_row(f"{name} (ms):", "none"))
            continue
        lines.append(_row(f"Mean {name} (ms):", statistics.fmean(values) * 1000))
        lines.append(_row(f"Median {name} (ms):", statistics.median(values) * 1000))
        for percent in percentiles:
            lines.append(_row(f"P{percent:g} {name} (ms):", percentile(values, percent) * 1000))
    lines.append("=" * _WIDTH)
    if report.first_error is not None:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in report.errors.items())
        lines.append(f"Errors: {kinds}. The first: {report.first_error}")
    return "\n".join(lines) + "\n"


def _counts(report: Report) -> list[str]:
    by = " and ".join(_COUNTED_BY[name] for name in sorted(report.counted_by)) or "nobody"
    unfinished = [_row("Unfinished requests:", report.unfinished)] if report.unfinished else []
    return [
        _row("Successful requests:", report.completed),
        _row("Failed requests:", report.failed),
        *unfinished,
        _row("Benchmark duration (s):", report.duration_s),
        _row("Total input tokens:", report.prompt_tokens),
        _row("Total generated tokens:", report.output_tokens),
        _row("Tokens counted by:", by),
        _row("Answers of the asked length:", report.of_asked_length),
        _row("Tokens per event:", report.tokens_per_event),
    ]


def _rates(report: Report) -> list[str]:
    good = [] if report.good is None else [_row("Request goodput (req/s):", _goodput(report))]
    normalized = "none" if report.normalized_s is None else report.normalized_s * 1000
    return [
        _row("Request throughput (req/s):", report.per_s(report.completed)),
        *good,
        _row("Output token throughput (tok/s):", report.per_s(report.output_tokens)),
        _row("Peak output token throughput (tok/s):", report.peak_output_tokens_s),
        _row("Peak concurrent requests:", report.peak_concurrency),
        _row("Total token throughput (tok/s):", report.per_s(_all_tokens(report))),
        _row("Mean normalized latency (ms/tok):", normalized),
    ]


def _row(name: str, value: float | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {text:<10}".rstrip()


def _goodput(report: Report) -> float:
    return report.per_s(report.good or 0)


def _all_tokens(report: Report) -> int:
    return report.prompt_tokens + report.output_tokens


def report_json(report: Report, metrics: Sequence[str], percentiles: Sequence[float]) -> Json:
    """A report for machines, by vLLM's keys where it has one; times in milliseconds."""
    fields: Json = {
        "duration": report.duration_s,
        "completed": report.completed,
        "failed": report.failed,
        "unfinished": report.unfinished,
        "total_input_tokens": report.prompt_tokens,
        "total_output_tokens": report.output_tokens,
        "request_throughput": report.per_s(report.completed),
        "request_goodput": None if report.good is None else _goodput(report),
        "output_throughput": report.per_s(report.output_tokens),
        "total_token_throughput": report.per_s(_all_tokens(report)),
        "max_output_tokens_per_s": report.peak_output_tokens_s,
        "max_concurrent_requests": report.peak_concurrency,
        "mean_normalized_latency_ms": None
        if report.normalized_s is None
        else report.normalized_s * 1000,
        "answers_of_asked_length": report.of_asked_length,
        "tokens_per_event": report.tokens_per_event,
        "tokens_counted_by": dict(report.counted_by),
        "errors_by_kind": dict(report.errors),
        "first_error": report.first_error,
    }
    for metric in metrics:
        values = report.samples_s[metric]
        if values:
            fields[f"mean_{metric}_ms"] = statistics.fmean(values) * 1000
            fields[f"median_{metric}_ms"] = statistics.median(values) * 1000
            fields[f"std_{metric}_ms"] = statistics.pstdev(values) * 1000
            for percent in percentiles:
                fields[f"p{percent:g}_{metric}_ms"] = percentile(values, percent) * 1000
    return fields


def request_json(recording: Recording, outcome: Outcome | Failed, origin_s: float) -> Json:
    """One request for `--save-detailed`; times in seconds, the starts from the run's start on."""
    fields: Json = {
        "arrival": recording.arrival_s - origin_s,
        "start": outcome.start_s - origin_s,
        "e2el": outcome.end_s - outcome.start_s,
        "error": None,
    }
    if isinstance(outcome, Failed):
        return fields | {"error": {"kind": outcome.kind, "message": outcome.story}}
    return fields | {
        "input_len": outcome.prompt_tokens,
        "output_len": outcome.output_tokens,
        "counted_by": outcome.counted_by,
        "ttft": outcome.ttft_s,
        "tpots": outcome.tpots_s,
        "itls": outcome.itls_s,
        "texts": outcome.texts,
    }
