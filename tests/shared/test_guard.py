"""Who ends a process that stands still: real ones, stopped as a whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.guard import Guard
from tests.stack.stack import until

ROOT = Path(__file__).parents[2]
BEATING = """
import sys, time
from shared.guard import Guard
from shared.logs import configure_logs
configure_logs("sleeper")
guard = Guard("sleeper", "json")
while True:
    guard.beat(2)
    print("beat", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def beating(tmp_path):
    """A process with a guard that forgives two seconds, and the guard."""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", BEATING], stdout=subprocess.PIPE, stderr=log, cwd=ROOT
        )
    with process:
        try:
            process.stdout.readline()
            (guard,) = psutil.Process(process.pid).children()
            yield process, guard
        finally:
            process.kill()
    until(lambda: is_gone(guard), "no guard outlives whom it watches")


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_one_that_is_stopped_is_killed_and_that_is_told(beating, tmp_path):
    process, _ = beating
    process.send_signal(signal.SIGSTOP)
    assert process.wait(30) == -signal.SIGKILL
    until(lambda: '"event": "standstill"' in (tmp_path / "log").read_text(), "told")
    said = (tmp_path / "log").read_text()
    assert f'"pid": {process.pid}' in said
    assert '"silent_s": 2' in said


def test_one_that_beats_is_left_alone_for_longer_than_is_forgiven(beating):
    process, _ = beating
    for _ in range(30):  # three seconds of beats
        assert process.stdout.readline()
    assert process.poll() is None


def test_one_that_is_stopped_for_a_moment_only_is_left_alone(beating):
    process, _ = beating
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "stopped")
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline()
    assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_guard_ends_with_whom_it_watches(beating, number):
    process, guard = beating
    os.kill(process.pid, number)
    process.wait(30)
    until(lambda: is_gone(guard), "gone too")


def test_one_whose_guard_has_gone_goes_on_and_says_so_once(beating, tmp_path):
    process, guard = beating
    guard.kill()
    until(lambda: "guard_lost" in (tmp_path / "log").read_text(), "told")
    for _ in range(10):
        assert process.stdout.readline()
    assert (tmp_path / "log").read_text().count("guard_lost") == 1


def test_one_that_closes_its_guard_is_left_alone():
    with Guard("this") as guard:
        (its,) = [
            one for one in psutil.Process().children() if "shared.guard_process" in one.cmdline()
        ]
        guard.beat()
    assert is_gone(its)
