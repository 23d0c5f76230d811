"""The results for people: one table a metric, a line for each server."""

import statistics
from collections.abc import Callable, Iterable

from ops.bench.contest.results import OURS, Results

Number = float | None


def write_table(results: Results) -> str:
    """All of it."""
    names = list(results.servers)
    parts = [
        _section(
            results, "output tokens/s",
            [*((n, _medians(results, n, "tokens_per_s")) for n in names),
             ("floor", results.floor), ("splitflap / best peer", results.ratio)],
            "{:.0f}", {"splitflap / best peer": "{:.2f}"},
        ),
        _section(
            results, "times the floor",
            [(n, lambda cell, n=n: results.x_of_floor(n, cell)) for n in names], "{:.2f}",
        ),
        _section(
            results, "time to first token, p50, ms",
            [*((n, _medians(results, n, "ttft_ms")) for n in names),
             ("splitflap / best peer", lambda cell: results.ratio(cell, "ttft_ms"))],
            "{:.0f}", {"splitflap / best peer": "{:.2f}"},
        ),
        _section(
            results, "time per output token, p50, ms",
            [(n, _medians(results, n, "tpot_ms")) for n in names], "{:.1f}",
        ),
        _section(
            results, "memory, peak PSS of all its processes, MiB",
            [*((n, _medians(results, n, "pss_mib")) for n in names),
             ("splitflap, KV pool apart", _medians(results, OURS, "pss_without_pool_mib"))],
            "{:.0f}",
        ),
        _about(results),
    ]  # fmt: skip
    best = {cell: results.best_peer(cell) for cell in results.cells}
    if any(best.values()):
        told = ", ".join(f"{cell} {peer[0]}" for cell, peer in best.items() if peer)
        parts.append(f"best peer (tokens/s): {told}")
    parts += results.failures()
    return "\n\n".join(parts) + "\n"


def _medians(results: Results, name: str, metric: str) -> Callable[[str], Number]:
    def of(cell: str) -> Number:
        return results.servers[name].median(cell, metric) if name in results.servers else None

    return of


def _section(
    results: Results,
    title: str,
    rows: Iterable[tuple[str, Callable[[str], Number]]],
    form: str,
    other_forms: dict[str, str] | None = None,
) -> str:
    """Rows without any number are left out."""
    lines = [f"{title:<44}" + "".join(f"{cell:>8}" for cell in results.cells)]
    for name, number in rows:
        values = [number(cell) for cell in results.cells]
        if all(value is None for value in values):
            continue
        use = (other_forms or {}).get(name, form)
        told = ["-" if value is None else use.format(value) for value in values]
        lines.append(f"  {name:<42}" + "".join(f"{text:>8}" for text in told))
    return "\n".join(lines)


def _about(results: Results) -> str:
    lines = [f"{'':<16}{'ready after, s':>15}{'idle, cores':>13}  version"]
    for name, server in results.servers.items():
        idle = statistics.median(server.idle_cores) if server.idle_cores else 0.0
        lines.append(f"  {name:<14}{server.ready_s:>15.1f}{idle:>13.2f}  {server.version}")
    if results.limits:
        read = statistics.median(limits.bytes_per_s for limits in results.limits) / 1e9
        peak = statistics.median(limits.flops_per_s for limits in results.limits) / 1e9
        lines.append(f"  measured in between: {read:.1f} GB/s read, {peak:.0f} GFLOP/s in bf16")
    return "\n".join(lines)
