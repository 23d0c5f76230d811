"""The real processes, as a user starts them: `splitflap up` on a free port."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 120
SETTLES_WITHIN_S = 30


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(url):
    """(status, body) of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(holds, what, within_s=SETTLES_WITHIN_S):
    """Poll until `holds()` is true and return its value; fail with `what` after a deadline."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if value := holds():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {within_s} s: {what}")


@dataclass
class Stack:
    """One running `splitflap up`."""

    process: subprocess.Popen
    port: int
    metrics_port: int
    folder: Path
    log: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def metrics(self):
        """The scheduler's samples: {'name{labels}': value}."""
        _, page = fetch(f"http://127.0.0.1:{self.metrics_port}/metrics")
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {name.removeprefix("splitflap:"): float(value) for name, value in lines}

    def blocks(self):
        """Blocks of the KV pool by state."""
        found = {}
        for name, value in self.metrics().items():
            if match := re.fullmatch(r'kv_blocks\{state="(\w+)"\}', name):
                found[match[1]] = value
        return found

    def unheld(self):
        """Blocks that nobody holds; what is in some of them is still known."""
        blocks = self.blocks()
        return blocks["free"] + blocks["cached"]

    def is_idle(self):
        """Nothing runs, waits or is swapped, and nobody holds a block."""
        metrics, blocks = self.metrics(), self.blocks()
        live = [metrics[f"num_requests_{state}"] for state in ("running", "waiting", "swapped")]
        return live == [0, 0, 0] and blocks["used"] == 0 and self.unheld() > 0

    def children(self):
        """{name: process} of the three."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, IndexError, ValueError):
                command = child.cmdline()
                found[command[command.index("services.cli") + 1]] = child
        return found

    def stop(self, number=signal.SIGINT):
        """Signal the parent and wait for its end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def start(folder, *flags, wait=True, python=("-m", "services.cli"), cwd=ROOT):
    """Start a stack whose sockets and log lie in `folder`.

    `python` is how Python is told to run the command.
    """
    port, metrics_port = free_port(), free_port()
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable, *python, "up", "--port", str(port),
                "--scheduler-metrics-port", str(metrics_port), *flags,
            ],
            stdout=out, stderr=subprocess.STDOUT, cwd=cwd,
            env={**os.environ, "TMPDIR": str(folder)}, start_new_session=True,
        )  # fmt: skip
    stack = Stack(process, port, metrics_port, folder, log)
    if wait:
        wait_ready(stack)
    return stack


def wait_ready(stack):
    def ready():
        assert stack.process.poll() is None, stack.log.read_text()
        return fetch(stack.url + "/health/ready")[0] == 200

    try:
        until(ready, "ready", READY_WITHIN_S)
    except AssertionError:
        stack.stop(signal.SIGKILL)
        raise


@contextlib.contextmanager
def counted(stack):
    """How much each of the scheduler's samples grew while the block ran."""
    grown, before = {}, stack.metrics()
    yield grown
    after = stack.metrics()
    grown.update({name: value - before.get(name, 0.0) for name, value in after.items()})


def events(raw):
    """The JSON of each `data:` event of a whole SSE answer, `[DONE]` left as it is."""
    found = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in found]
