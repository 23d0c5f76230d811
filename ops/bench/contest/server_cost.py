"""What serving costs beside computing: a run's own plans, replayed in one process without sockets.

    python -m ops.bench.contest.server_cost [--only A1,A8,A32] [--replays 3] [--quick]

`splitflap up` serves a load while its executor writes down its plans (recording.py); then the
server ends, and the same plans run through the same `Interpreter` one after the other, here. The
share is (time of the replay) / (wall time of the load, from the first request sent to the last
answer whole): what is missing to 1 is what gateway, scheduler, sockets, client and waiting for a
processor took. The aim is 0.9. It compares two times of one machine: on one whose speed changes in
between, the share that computing had in the server itself is the number to look at.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from kernels.select import select_draws
from ops.bench.contest.cells import Load, choose
from ops.bench.contest.contestants import ROOT
from ops.bench.contest.recording import Recorded, read
from ops.bench.contest.server_process import ServerProcess, end_by_sigterm, free_port
from services.bench.run import run
from services.bench.tokens import load_tokens
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.loader import load_model
from services.executor.native_drawing import NativeDrawing
from shared.messages import StepFailed
from shared.model_source import DEFAULT_MODEL, find_model


@dataclass(frozen=True)
class Span:
    """When a load began and ended, by time.perf_counter."""

    cell: str
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s

    def plans(self, recorded: Sequence[Recorded]) -> list[int]:
        """Indices of the plans carried out meanwhile."""
        return [
            at
            for at, one in enumerate(recorded)
            if self.began_s <= one.began_s and one.ended_s <= self.ended_s
        ]


@dataclass(frozen=True)
class Pools:
    """How the server's executor was made, from its log."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_swap_blocks: int
    threads: int

    @classmethod
    def of(cls, log: str) -> "Pools":
        """Raises: SystemExit if the log does not tell."""
        events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]

        def told(start: str) -> dict[str, Any]:
            for event in events:
                if str(event.get("event")).startswith(start):
                    return dict(event)
            raise SystemExit(f"the executor's log says nothing that begins with {start!r}")

        pool, swap, ready = told("pool: "), told("swap space: "), told("executor_ready")
        return cls(
            pool["blocks"], pool["block_size"], pool["max_model_len"], swap["blocks"],
            ready["threads"],
        )  # fmt: skip

    def interpreter(self) -> Interpreter:
        """The same hands, in this process."""
        torch.set_num_threads(self.threads)
        model = load_model(
            find_model(DEFAULT_MODEL), torch.bfloat16, torch.device("cpu"), lambda _: None
        )
        pools = KVPools(model, self.num_blocks, self.block_size, self.num_swap_blocks)
        draws = select_draws()
        drawing = None if draws is None else NativeDrawing(draws)
        return Interpreter(model, pools, self.max_model_len, drawing)


def serve(loads: Sequence[Load], flags: Sequence[str], folder: Path) -> tuple[list[Span], str]:
    """Run each load against a recording server; its plans are in folder/plans afterwards."""
    port = free_port()
    command = [
        sys.executable, "-m", "ops.bench.contest.recording", str(folder / "plans"), "up",
        f"--port={port}", "--dtype=bfloat16", "--log-format=json", *flags,
    ]  # fmt: skip
    server = ServerProcess(command, {}, folder / "up.log", ROOT)
    spans = []
    try:
        url = f"http://127.0.0.1:{port}"
        server.await_ready(url + "/health/ready")
        for load in loads:
            ran = uvloop.run(run(load.settings(url, "{}"), load.plans, load.warm_up))
            if ran.was_interrupted:
                raise KeyboardInterrupt
            spans.append(Span(load.cell.name, ran.start_s, ran.start_s + ran.duration_s))
    finally:
        server.stop()
    return spans, server.log_text()


def replay(interpreter: Interpreter, recorded: Sequence[Recorded]) -> list[float]:
    """Seconds of each plan, in their order. Raises: SystemExit if one fails."""
    interpreter.forget()
    seconds = []
    for one in recorded:
        began_s = time.perf_counter()
        result = interpreter.run(one.plan)
        seconds.append(time.perf_counter() - began_s)
        if isinstance(result, StepFailed):
            raise SystemExit(f"step {one.plan.step_id} fails in the replay: {result.message}")
    return seconds


def write_shares(
    spans: Sequence[Span], recorded: Sequence[Recorded], replays: Sequence[Sequence[float]]
) -> str:
    """A line for each load. Of several replays of a load the median counts."""
    heads = {"": 6, "plans": 7, "wall s": 9, "computing s": 13, "share": 7, "replay s": 10}
    lines = ["".join(f"{head:>{width}}" for head, width in heads.items()) + f"{'share':>7}"]
    for span in spans:
        plans = span.plans(recorded)
        computing_s = sum(recorded[at].ended_s - recorded[at].began_s for at in plans)
        replay_s = statistics.median(sum(seconds[at] for at in plans) for seconds in replays)
        lines.append(
            f"{span.cell:<6}{len(plans):>7}{span.seconds:>9.2f}{computing_s:>13.2f}"
            f"{computing_s / span.seconds:>7.2f}{replay_s:>10.2f}{replay_s / span.seconds:>7.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Serve, replay, print."""
    parser = argparse.ArgumentParser(
        prog="ops.bench.contest.server_cost",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="Any other flag goes to `splitflap up`.",
    )
    parser.add_argument("--only", metavar="CELLS", default="A1,A8,A32,B,C")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few requests")
    options, flags = parser.parse_known_args()
    end_by_sigterm()
    tokens = load_tokens(DEFAULT_MODEL)
    loads = [Load.of(cell, 0, tokens, quick=options.quick) for cell in choose(options.only)]
    with tempfile.TemporaryDirectory() as folder:
        spans, log = serve(loads, flags, Path(folder))
        recorded = list(read(Path(folder) / "plans"))
    interpreter = Pools.of(log).interpreter()
    replays = [replay(interpreter, recorded) for _ in range(options.replays)]
    print(write_shares(spans, recorded, replays))


if __name__ == "__main__":
    main()
