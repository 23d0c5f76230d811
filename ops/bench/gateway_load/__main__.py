"""What streaming costs: tokens per CPU-second of gateways and scheduler, memory per open stream.

    python -m ops.bench.gateway_load [--cells 1x256,2x256,4x256,1x2000,idle] [--json FILE]

The real processes (scheduler, an executor with the toy model, 1, 2 or 4 gateways) and up to 2,000
SSE streams, read by a process of their own. A cell GxN has G gateways and N streams that all get a
token each step; `idle` has 2,000 streams of which one runs and the others wait; `bare` puts a bare
aiohttp server in the gateway's place (`bare.py`): the least that can be hoped for.

CPU-seconds are the kernel's, user and system, of each process over the window, the rate of tokens
is what the readers count: a busy machine changes wall time, and these little. Steps are paced
(`--tokens-per-s` over all streams), so that each token is an event of its own.

Added latency: from the moment a token's step has ended to its arrival at the reader. When steps end
is told by one request more, straight at the scheduler, that shares every step. It is a lower bound
where it is longer than a step lasts.

Memory is the growth of PSS over the streams, after 64 streams before them were opened and closed.
"""

import argparse
import asyncio
import json
import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ops.bench.gateway_load.added import Tap, added_ms
from ops.bench.gateway_load.processes import MAX_LEN, Cell, Clients, started

NUM_WARM: Final = 64
MAX_TOKENS: Final = MAX_LEN - 64
DEFAULT_CELLS: Final = "bare,1x256,2x256,4x256,1x2000,idle"


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell's figures; CPU per token in microseconds, memory in KB of 1,024 bytes."""

    cell: str
    tokens_per_s: float
    tokens_per_event: float
    gateway_tokens_per_cpu_s: float
    scheduler_tokens_per_cpu_s: float | None
    gateway_cpu_share: float
    added_ms_p50: float | None
    added_ms_p99: float | None
    gateway_kb_per_stream: float
    scheduler_kb_per_stream: float | None


async def measure(cell: Cell, label: str, seconds: float, tokens_per_s: float) -> Measured:
    """One cell."""
    step_s = 0.02 if cell.kind == "idle" else cell.num_streams / tokens_per_s
    async with started(cell, step_s) as stack:
        warm = Clients(NUM_WARM, 8, stack.ports)
        await warm.ask("open")
        await asyncio.sleep(1)
        warm.stop()
        await asyncio.sleep(2)
        procs = [*stack.gateways, *([stack.scheduler] if stack.scheduler else [])]
        before_kb = {proc.name: proc.pss_kb for proc in procs}
        clients = Clients(cell.num_streams, MAX_TOKENS, stack.ports)
        tap = None
        try:
            answer = await clients.ask("open")
            if answer["open"] != cell.num_streams:
                sys.exit(f"only {answer['open']} of {cell.num_streams} streams are open")
            if cell.kind == "active":
                tap = Tap(stack.endpoint, MAX_TOKENS)
                await tap.begin()
            await clients.all_begun(1 if cell.kind == "idle" else cell.num_streams)
            await asyncio.sleep(2)
            await clients.ask("watch")
            first, cpu_first = await clients.ask("look"), {p.name: p.cpu_s for p in procs}
            await asyncio.sleep(seconds)
            last, cpu_last = await clients.ask("look"), {p.name: p.cpu_s for p in procs}
            grown_kb = {proc.name: proc.pss_kb - before_kb[proc.name] for proc in procs}
            notes = await clients.ask("seen")
            if last["over"]:
                sys.exit(f"{last['over']} streams have ended in between")
        finally:
            clients.stop()
            if tap is not None:
                await tap.end()
    used = {name: cpu_last[name] - cpu_first[name] for name in cpu_last}
    tokens, wall_s = last["tokens"] - first["tokens"], last["at"] - first["at"]
    in_gateways = sum(used[proc.name] for proc in stack.gateways)
    has_scheduler = stack.scheduler is not None
    late = added_ms(tap.times, notes) if tap is not None else []
    return Measured(
        label,
        tokens / wall_s,
        tokens / max(1, last["events"] - first["events"]),
        tokens / in_gateways,
        tokens / used["scheduler"] if has_scheduler else None,
        in_gateways / wall_s / len(stack.gateways),
        statistics.median(late) if late else None,
        late[int(len(late) * 0.99)] if late else None,
        sum(grown_kb[proc.name] for proc in stack.gateways) / cell.num_streams,
        grown_kb["scheduler"] / cell.num_streams if has_scheduler else None,
    )


def show(rows: list[Measured]) -> None:
    """A table."""
    print(f"{'cell':>8} {'tok/s':>7} {'tok/ev':>6} {'gw tok/cpu-s':>12} {'sched':>8} {'gw cpu':>6} "
          f"{'p50 ms':>7} {'p99 ms':>7} {'gw KB/str':>9} {'sched KB':>8}")  # fmt: skip
    for row in rows:
        print(
            f"{row.cell:>8} {row.tokens_per_s:7.0f} {row.tokens_per_event:6.2f} "
            f"{row.gateway_tokens_per_cpu_s:12.0f} {row.scheduler_tokens_per_cpu_s or 0:8.0f} "
            f"{row.gateway_cpu_share:6.2f} {row.added_ms_p50 or 0:7.1f} "
            f"{row.added_ms_p99 or 0:7.1f} {row.gateway_kb_per_stream:9.1f} "
            f"{row.scheduler_kb_per_stream or 0:8.1f}"
        )


async def main() -> None:
    """Measure every cell, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", default=DEFAULT_CELLS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--tokens-per-s", type=float, default=4000.0, help="over all streams")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    for _ in range(given.rounds):
        for label in given.cells.split(","):
            cell = Cell.read(label)
            rows.append(await measure(cell, label, given.seconds, given.tokens_per_s))
            show(rows[-1:])
    if given.rounds > 1 or len(rows) > 1:
        show(rows)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
