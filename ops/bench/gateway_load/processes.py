"""The processes of a measurement, and what the kernel says of them."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
TICKS: Final = os.sysconf("SC_CLK_TCK")
FIRST_PORT: Final = 18110
BLOCK_SIZE: Final = 16
MAX_LEN: Final = 2048
READY_WITHIN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: so many gateways and streams; or `kind` idle or bare."""

    kind: str
    num_gateways: int
    num_streams: int

    @classmethod
    def read(cls, text: str) -> "Cell":
        """GxN, idle or bare."""
        if text == "idle":
            return cls("idle", 1, 2000)
        if text == "bare":
            return cls("bare", 1, 256)
        gateways, _, streams = text.partition("x")
        return cls("active", int(gateways), int(streams))


class Proc:
    """One process of the server, and what the kernel says of it."""

    def __init__(self, name: str, *command: str, log: Path) -> None:
        self.name = name
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, stdout=out, stderr=out
            )
        self._log = log

    @property
    def cpu_s(self) -> float:
        """User and system time so far, of all its threads."""
        self.check()
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / TICKS

    @property
    def pss_kb(self) -> float:
        """Proportional set size."""
        for line in Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1])
        raise RuntimeError("no Pss")

    def check(self) -> None:
        """End everything if it has ended."""
        if self._process.poll() is not None:
            sys.exit(f"{self.name} has ended:\n{self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(10)


class Clients:
    """The readers' process."""

    def __init__(self, count: int, max_tokens: int, ports: list[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ops.bench.gateway_load.readers", str(count), str(max_tokens),
             *map(str, ports)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def ask(self, question: str) -> Any:
        """Its answer."""
        return await asyncio.to_thread(self._ask, question)

    def _ask(self, question: str) -> Any:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        process.stdin.write(question + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            sys.exit("the readers have ended")
        return json.loads(line)

    async def all_begun(self, count: int) -> None:
        """Until so many streams have a token."""
        while (await self.ask("look"))["begun"] < count:  # noqa: ASYNC110 - another process knows
            await asyncio.sleep(0.5)

    def stop(self) -> None:
        """Kill it; all its streams break off."""
        self._process.kill()
        self._process.wait(10)


@dataclass(frozen=True, slots=True)
class Stack:
    """What was started."""

    gateways: list[Proc]
    scheduler: Proc | None
    ports: list[int]
    endpoint: str


@contextlib.asynccontextmanager
async def started(cell: Cell, step_s: float) -> AsyncIterator[Stack]:
    """The processes of a cell, ready."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="gateway-load-")))
        ports = [FIRST_PORT + number for number in range(cell.num_gateways)]
        log = folder / "log.txt"

        def begin(name: str, *command: str) -> Proc:
            proc = Proc(name, *command, log=log)
            exits.callback(proc.stop)
            return proc

        if cell.kind == "bare":
            bare = begin("bare", "ops.bench.gateway_load.bare", str(ports[0]), str(step_s))
            await asyncio.sleep(2)
            yield Stack([bare], None, ports, "")
            return
        requests, steps = f"ipc://{folder}/requests.ipc", f"ipc://{folder}/steps.ipc"
        seqs = 1 if cell.kind == "idle" else cell.num_streams + 1
        common = ("--log-level", "warning")
        scheduler = begin(
            "scheduler", "services.cli", "scheduler", *common, "--request-endpoint", requests,
            "--step-endpoint", steps, "--max-num-seqs", str(seqs),
            "--max-num-batched-tokens", str(max(4096, 2 * seqs)),
        )  # fmt: skip
        begin(
            "executor", "services.cli", "executor", *common, "--model", "toy",
            "--step-endpoint", steps, "--toy-step-ms", str(round(step_s * 1e3, 3)),
            "--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_LEN),
            "--num-gpu-blocks-override", str((seqs + 1) * MAX_LEN // BLOCK_SIZE),
        )  # fmt: skip
        gateways = [
            begin(
                f"gateway {port}", "services.cli", "gateway", *common, "--model", "toy",
                "--port", str(port), "--request-endpoint", requests,
            )
            for port in ports
        ]  # fmt: skip
        await asyncio.to_thread(wait_ready, ports, [scheduler, *gateways])
        yield Stack(gateways, scheduler, ports, requests)


def wait_ready(ports: list[int], procs: list[Proc]) -> None:
    """Until all gateways can serve."""
    deadline = time.monotonic() + READY_WITHIN_S
    for port in ports:
        while True:
            for proc in procs:
                proc.check()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
                break
            if time.monotonic() > deadline:
                sys.exit("not ready in time")
            time.sleep(0.1)
