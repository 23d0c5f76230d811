"""The processes of a stack, each started by itself, and again when it dies, as an engine would."""

import contextlib
import os
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass

from tests.stack.stack import ROOT, Stack, fetch, free_port, until

LOOKS_EVERY_S = 0.1


@dataclass
class Door:
    """One gateway's port; the client's helpers take it for a stack."""

    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self):
        return fetch(self.url + "/health/ready")[0] == 200


class Crew(Stack):
    """A scheduler, an executor and gateways. What `Stack` tells of gateways is of the first."""

    def __init__(self, folder, doors, metrics_port, commands):
        super().__init__(None, doors[0].port, metrics_port, folder, folder / "scheduler.txt")
        self.doors = doors
        self.ends = defaultdict(list)
        """{name: exit statuses}, of each process that ended."""
        self._commands = commands
        self._running = {}
        self._leaving = threading.Event()
        for name in commands:
            self._spawn(name)
        self._keeper = threading.Thread(target=self._keep, name="keeper")
        self._keeper.start()

    def pids(self):
        return {name: process.pid for name, process in self._running.items()}

    def said(self, name):
        return (self.folder / f"{name}.txt").read_text()

    def are_all_ready(self):
        return all(door.is_ready() for door in self.doors)

    def restart(self, name, number):
        """Signal one and wait for its end; another one is there soon. Returns: its status."""
        process = self._running[name]
        process.send_signal(number)
        status = process.wait(60)
        until(lambda: self._running[name] is not process, "another one")
        return status

    def stop(self):
        self._leaving.set()
        self._keeper.join()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, name):
        with (self.folder / f"{name}.txt").open("a") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *self._commands[name]],
                stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ,
            )  # fmt: skip

    def _keep(self):
        while not self._leaving.wait(LOOKS_EVERY_S):
            for name, process in list(self._running.items()):
                if process.poll() is not None:
                    self.ends[name].append(process.returncode)
                    self._spawn(name)


@contextlib.contextmanager
def crew(folder, *, gateways=1, executor=("services.cli", "executor"), flags=None):
    """A crew that is ready, with the toy.

    `executor` is the module that is one and its first arguments; `flags` are those of each kind.
    """
    flags = {"gateway": (), "scheduler": (), "executor": ()} | (flags or {})
    requests, steps = f"ipc://{folder}/requests.ipc", f"ipc://{folder}/steps.ipc"
    doors, metrics_port = [Door(free_port()) for _ in range(gateways)], free_port()
    commands = {
        "scheduler": (
            *("services.cli", "scheduler", "--request-endpoint", requests),
            *("--step-endpoint", steps, "--metrics-port", str(metrics_port), *flags["scheduler"]),
        ),
        "executor": (*executor, "--model", "toy", "--step-endpoint", steps, *flags["executor"]),
    } | {
        f"gateway-{at}": (
            *("services.cli", "gateway", "--model", "toy", "--request-endpoint", requests),
            *("--port", str(door.port), *flags["gateway"]),
        )
        for at, door in enumerate(doors)
    }
    one = Crew(folder, doors, metrics_port, commands)
    try:
        until(one.are_all_ready, "all ready", 120)
        yield one
    finally:
        one.stop()
