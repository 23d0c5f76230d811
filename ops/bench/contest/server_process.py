"""A server as a child process: started, awaited, watched, stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.bench.contest.memory import tree

READY_WITHIN_S = 600.0
STOPPED_WITHIN_S = 60.0
POLL_S = 0.05


def end_by_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DidNotStart(Exception):
    """A server ended, or was not ready in time; its last words are in the message."""


class ServerProcess:
    """One server with its children; what it prints goes to `log`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        self._log = log
        self._started_s = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=os.environ | dict(environment), stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, cwd=cwd, start_new_session=True,
            )  # fmt: skip

    def await_ready(self, url: str) -> float:
        """Until `url` answers 200: seconds from the start. Raises: DidNotStart."""
        while not _answers(url):
            took_s = time.monotonic() - self._started_s
            if self._process.poll() is not None or took_s > READY_WITHIN_S:
                self.stop()
                raise DidNotStart(
                    f"not ready after {took_s:.0f} s; its last words:\n{self._tail()}"
                )
            time.sleep(POLL_S)
        return time.monotonic() - self._started_s

    def pids(self) -> list[int]:
        """Of all its processes."""
        return tree(self._process.pid)

    def log_text(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ctrl-C; what is left of its group after a while is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"{self._log.stem} did not stop by itself and is killed\n")
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-15:])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
