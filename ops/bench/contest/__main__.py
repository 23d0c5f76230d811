"""Splitflap against every other server found, in turns in one run, and against the machine's floor.

    python -m ops.bench.contest [--rounds 3] [--quick] [--only A1,B] [--peers vllm=/venv,...]

Every server stays up for the whole run. A round goes through the cells (docs/bench.md, workloads);
before each the machine's limits are measured, then the servers have their turns at the same
requests, in an order that shifts by one each round. Reported are medians of the rounds.
Peers are those of --peers, else of $BENCH_PEERS, else all that are found on the PATH or can be
imported. transformers' `generate` runs offline beside them: if nobody was named, or it was too.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from ops.bench.contest.cells import Load, choose
from ops.bench.contest.contestants import ROOT, Splitflap, cores, find_peers
from ops.bench.contest.floor import Floor, Limits, Work
from ops.bench.contest.machine import busy_cores_elsewhere, machine
from ops.bench.contest.memory import cpu_s
from ops.bench.contest.plot import plot
from ops.bench.contest.results import OURS, Results, Server
from ops.bench.contest.runners import Measure, OfflineRunner, Runner, ServerRunner
from ops.bench.contest.server_process import DidNotStart, end_by_sigterm
from ops.bench.contest.table import write_table
from ops.bench.contest.weights import Weights, default_folder, weights_of
from ops.bench.step_speed import Limits as LimitsProbe
from services.bench.tokens import Tokens, load_tokens
from shared.model_source import DEFAULT_MODEL, find_model

OUT = ROOT / "docs" / "experiments" / "bench"


class Turns:
    """The run."""

    def __init__(self, runners: Sequence[Runner], results: Results, work: Work) -> None:
        self._runners = list(runners)
        self._work = work
        self._probe = LimitsProbe(torch.bfloat16, len(cores()))
        self.results = results

    def start_all(self) -> None:
        """One after the other; a peer that does not start is left out.

        Raises: SystemExit if it is Splitflap that does not.
        """
        for runner in list(self._runners):
            tell(f"starting {runner.name}")
            try:
                runner.start()
            except DidNotStart as error:
                if runner.name == OURS:
                    raise SystemExit(f"{runner.name}: {error}") from error
                tell(f"{runner.name} is left out: {error}")
                self._runners.remove(runner)
                continue
            server = Server(runner.version(), runner.command, runner.ready_s)
            self.results.servers[runner.name] = server
            tell(f"{runner.name} {server.version} ready after {runner.ready_s:.1f} s")

    def round(self, number: int, loads: Sequence[Load]) -> None:
        """Each load for each server, and the floor of each."""
        first = number % len(self._runners)
        order = self._runners[first:] + self._runners[:first]
        for load in loads:
            limits = Limits(*self._probe.measure())
            floor = Floor.of(load, self._work, limits)
            self.results.limits.append(limits)
            self.results.floors.setdefault(load.cell.name, []).append(floor)
            tell(f"round {number + 1}, {load.cell.name}: floor {floor.tokens_per_s:.0f} tokens/s")
            for runner in order:
                self._turn(runner, load)

    def _turn(self, runner: Runner, load: Load) -> None:
        others = [other for other in self._runners if other is not runner]
        before = {other.name: (cpu_s(other.pids()), time.monotonic()) for other in others}
        measure = self._measure(runner, load)
        for other in others:
            used_s, at_s = before[other.name]
            share = (cpu_s(other.pids()) - used_s) / (time.monotonic() - at_s)
            self.results.servers[other.name].idle_cores.append(max(0.0, share))
        rounds = self.results.servers[runner.name].rounds
        rounds.setdefault(load.cell.name, []).append(measure)
        tell(f"    {runner.name:<12} {said(measure)}")

    @staticmethod
    def _measure(runner: Runner, load: Load) -> Measure:
        try:
            if not runner.is_alive():
                runner.start()
            return runner.measure(load)
        except DidNotStart as error:
            count = len(load.plans)
            return Measure(0.0, None, None, 0.0, failed=count, first_error=str(error))

    def stop_all(self) -> None:
        """For good."""
        for runner in self._runners:
            runner.stop()


def said(measure: Measure) -> str:
    """One turn in one line."""
    text = f"{measure.tokens_per_s:7.1f} tokens/s"
    if measure.ttft_ms is not None and measure.tpot_ms is not None:
        text += f", TTFT {measure.ttft_ms:6.0f} ms, TPOT {measure.tpot_ms:6.1f} ms"
    text += f", PSS {measure.pss_mib:.0f} MiB"
    if measure.pss_without_pool_mib is not None:
        text += f" ({measure.pss_without_pool_mib:.0f} without the KV pool)"
    if measure.failed:
        text += f"; {measure.failed} FAILED: {measure.first_error}"
    return text


def tell(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Read the command line, run, print the table, write what is to be kept."""
    options = read_options()
    end_by_sigterm()
    cells = choose(options.only)
    peers, with_transformers = find_peers(options.peers)
    source = find_model(DEFAULT_MODEL)
    work, tokens = Work.of(source), load_tokens(DEFAULT_MODEL)
    weights = weights_of(DEFAULT_MODEL, options.weights)
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        bytes_per_token = work.shape.bytes_per_token(work.element_bytes)
        ours = Splitflap(tuple(options.flags), bytes_per_token)
        runners = [*make_runners([ours, *peers], weights, logs, tokens)]
        runners += [OfflineRunner(weights, logs)] if with_transformers else []
        turns = Turns(runners, Results([cell.name for cell in cells]), work)
        stack.callback(turns.stop_all)
        about = {"began": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(),
                 "load_before": busy_cores_elsewhere(), "rounds": options.rounds,
                 "is_quick": options.quick}  # fmt: skip
        try:
            turns.start_all()
            for number in range(options.rounds):
                turns.round(
                    number, [Load.of(c, number, tokens, quick=options.quick) for c in cells]
                )
        except KeyboardInterrupt:
            tell("interrupted: this is what there is, and it is not kept")
            options.out = None
        print(write_table(turns.results))
    if options.out is not None:
        keep(turns.results, about, options.out)


def make_runners(
    contestants: Sequence[object], weights: Weights, logs: Path, tokens: Tokens
) -> list[ServerRunner]:
    """A runner for each server."""
    return [ServerRunner(one, weights, logs, tokens.count) for one in contestants]


def keep(results: Results, about: dict[str, object], out: Path) -> None:
    """JSON and figure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {"what": "ops/bench/contest, docs/bench.md", **about, **results.as_json()}
    out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    tell(f"all numbers: {out.with_suffix('.json')}")
    try:
        plot(results, f"{DEFAULT_MODEL}, bf16, {len(cores())} cores", out.with_suffix(".svg"))
        tell(f"the figure: {out.with_suffix('.svg')}")
    except ImportError:
        tell("no figure: matplotlib is missing (pip install '.[plots]')")


def read_options() -> argparse.Namespace:
    """The command line; what it does not know goes to `splitflap up`."""
    parser = argparse.ArgumentParser(
        prog="ops.bench.contest", description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="Any other flag goes to `splitflap up`, for example --threads 2.",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="default: 3; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it works")
    parser.add_argument("--only", metavar="CELLS", help="of A1,A8,A32,A64,B,C,L; default: all")
    parser.add_argument("--peers", help="vllm=VENV,llama=BINARY,openvino=VENV,transformers or none")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.svg; default: "
                        "docs/experiments/bench, and nowhere with --quick or --only")  # fmt: skip
    parser.add_argument("--weights", type=Path, default=default_folder(),
                        help="where the weights are kept in other servers' forms")  # fmt: skip
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    options, options.flags = parser.parse_known_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.out is None and not (options.quick or options.only):
        options.out = OUT
    return options


if __name__ == "__main__":
    main()
