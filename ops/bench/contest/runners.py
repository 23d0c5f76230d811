"""A contestant that runs: started once, then given one load after the other."""

import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import uvloop

from ops.bench.contest.cells import Load
from ops.bench.contest.contestants import OFFLINE, ROOT, Contestant, told_without_paths
from ops.bench.contest.memory import PeakMemory, tree
from ops.bench.contest.server_process import DidNotStart, ServerProcess, free_port
from ops.bench.contest.weights import Weights
from services.bench.outcome import judge
from services.bench.report import Report, summarize
from services.bench.run import run

MIB = 2**20


@dataclass(frozen=True)
class Measure:
    """One load of one server. Milliseconds are medians; None: there is no such number."""

    tokens_per_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    pss_mib: float
    pss_without_pool_mib: float | None = None
    failed: int = 0
    first_error: str | None = None
    tokens_per_event: float | None = None
    of_asked_length: int | None = None


class Runner(Protocol):
    """What the run in turns needs of each."""

    name: str
    ready_s: float
    command: str

    def version(self) -> str:
        """As it calls itself."""

    def start(self) -> None:
        """Until it is ready. Raises: DidNotStart."""

    def is_alive(self) -> bool:
        """It has been started and has not died."""

    def pids(self) -> list[int]:
        """Of all its processes."""

    def measure(self, load: Load) -> Measure:
        """Send a load and wait for its end."""

    def stop(self) -> None:
        """For good."""


class ServerRunner:
    """A contestant behind HTTP."""

    def __init__(
        self,
        contestant: Contestant,
        weights: Weights,
        logs: Path,
        count: Callable[[str], int],
    ) -> None:
        self.name = contestant.name
        self.ready_s = 0.0
        self.command = ""
        self._contestant = contestant
        self._weights = weights
        self._log = logs / f"{contestant.name}.log"
        self._count = count
        self._url = ""
        self._pool_bytes: int | None = None
        self._process: ServerProcess | None = None

    def version(self) -> str:
        """As it calls itself."""
        return self._contestant.version()

    def start(self) -> None:
        """Until it is ready. Raises: DidNotStart."""
        contestant, port = self._contestant, free_port()
        contestant.prepare(self._weights)
        command = contestant.command(self._weights, port)
        environment = contestant.environment()
        self.command = told_without_paths(command, environment)
        self._url = f"http://127.0.0.1:{port}"
        self._process = ServerProcess(command, environment, self._log, ROOT)
        self.ready_s = self._process.await_ready(self._url + contestant.ready_path)
        self._pool_bytes = contestant.pool_bytes(self._process.log_text())

    def is_alive(self) -> bool:
        """It has been started and has not died."""
        return bool(self.pids())

    def pids(self) -> list[int]:
        """Of all its processes."""
        return self._process.pids() if self._process is not None else []

    def measure(self, load: Load) -> Measure:
        """As `splitflap bench` does, in this process."""
        settings = load.settings(self._url, self._contestant.extra_body)
        with PeakMemory(self.pids, self._pool_bytes) as memory:
            ran = uvloop.run(run(settings, load.plans, load.warm_up))
        if ran.was_interrupted:
            raise KeyboardInterrupt
        outcomes = [
            judge(plan, recording, self._count)
            for plan, recording in zip(load.plans, ran.recordings, strict=True)
        ]
        report = summarize(outcomes, duration_s=ran.duration_s, unfinished=0, goodput_s={})
        without = memory.peak_without_pool
        return Measure(
            tokens_per_s=report.per_s(report.output_tokens),
            ttft_ms=_median_ms(report, "ttft"),
            tpot_ms=_median_ms(report, "tpot"),
            pss_mib=memory.peak / MIB,
            pss_without_pool_mib=None if without is None else without / MIB,
            failed=report.failed,
            first_error=report.first_error,
            tokens_per_event=report.tokens_per_event,
            of_asked_length=report.of_asked_length,
        )

    def stop(self) -> None:
        """For good."""
        if self._process is not None:
            self._process.stop()


def _median_ms(report: Report, metric: str) -> float | None:
    values = report.samples_s[metric]
    return 1e3 * statistics.median(values) if values else None


class OfflineRunner:
    """transformers' `generate` in static batches of as many requests as there are clients.

    It gets one batch a round (two where a batch is one request), since it takes so long.
    """

    def __init__(self, weights: Weights, logs: Path) -> None:
        self.name = OFFLINE
        self.ready_s = 0.0
        self.command = "transformers generate, offline, static batches, bf16"
        self._weights = weights
        self._log = logs / "transformers.log"
        self._process: subprocess.Popen[str] | None = None

    def version(self) -> str:
        """Of the package."""
        return importlib.metadata.version("transformers")

    def start(self) -> None:
        """Until the model is loaded."""
        folder = self._weights.folder()
        began_s = time.monotonic()
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ops.bench.contest.transformers_worker", str(folder)],
                cwd=ROOT, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        self._hear()
        self.ready_s = time.monotonic() - began_s

    def is_alive(self) -> bool:
        """It has been started and has not died."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Of all its processes."""
        return tree(self._process.pid) if self._process is not None else []

    def measure(self, load: Load) -> Measure:
        """In batches."""
        size = min(load.cell.clients, len(load.plans))
        plans = load.plans[: max(size, 2)]
        batches = [plans[first : first + size] for first in range(0, len(plans), size)]
        with PeakMemory(self.pids) as memory:
            seconds = sum(
                self._ask(
                    prompts=[list(plan.messages) for plan in batch],
                    max_tokens=[plan.max_tokens for plan in batch],
                    n=batch[0].num_choices,
                    temperature=batch[0].temperature,
                )
                for batch in batches
            )
        tokens = sum(plan.max_tokens * plan.num_choices for plan in plans)
        return Measure(tokens / seconds, None, None, memory.peak / MIB)

    def stop(self) -> None:
        """For good."""
        if self._process is not None:
            self._process.kill()  # it has no state, and may be in the middle of a batch
            self._process.communicate()  # to its end, and the pipes are closed

    def _ask(self, **asked: Any) -> float:
        assert self._process is not None
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(asked) + "\n")
        pipe.flush()
        return float(self._hear()["seconds"])

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise DidNotStart(
                f"transformers ended; its last words:\n{self._log.read_text()[-2000:]}"
            )
        heard: dict[str, Any] = json.loads(line)
        return heard

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
