"""How the processes start, find one another, and end."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.stack.client import complete, stream
from tests.stack.stack import ROOT, fetch, free_port, start, until

pytestmark = pytest.mark.stack


def sockets_in(folder):
    return [path for path in folder.rglob("*") if path.is_socket()]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def splitflap(command, *flags, log=subprocess.PIPE, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", command, *flags],
        cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True, **more,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_up_leaves_no_child_and_no_socket(tmp_path, number):
    stack = start(tmp_path, "--model", "toy")
    children = stack.children()
    assert set(children) == {"gateway", "scheduler", "executor"}
    assert len(sockets_in(tmp_path)) == 2
    status = stack.stop(number)
    assert status == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    until(lambda: all(map(is_gone, children.values())), "children gone")
    until(lambda: [path.name for path in tmp_path.iterdir()] == ["log.txt"], "nothing left")


def test_a_second_signal_does_not_wait_for_open_streams(tmp_path):
    stack = start(tmp_path, "--model", "toy", "--toy-step-ms", "50", "--shutdown-timeout", "600")
    pieces = stream(stack, prompt="long", max_tokens=4000, ignore_eos=True)
    next(pieces)
    stack.process.send_signal(signal.SIGINT)
    until(lambda: "draining" in stack.log.read_text(), "the first signal lets the stream go on")
    next(pieces)
    assert stack.stop(signal.SIGINT) == 0
    until(lambda: [path.name for path in tmp_path.iterdir()] == ["log.txt"], "nothing left")


def test_logs_for_machines_hold_nothing_else(tmp_path):
    stack = start(tmp_path, "--model", "toy", "--log-format", "json")
    until(lambda: '"event": "ready"' in stack.log.read_text(), "the event")
    assert stack.stop() == 0
    lines = [json.loads(line) for line in stack.log.read_text().splitlines()]
    (ready,) = [line for line in lines if line["event"] == "ready"]
    assert (ready["url"], ready["model"]) == (stack.url, "toy")
    assert not [line for line in lines if None in line.values()]


def test_two_stacks_on_one_machine_do_not_meet(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    stacks = [
        start(folder, "--model", "toy", "--served-model-name", folder.name) for folder in folders
    ]
    try:
        names = [fetch(stack.url + "/v1/models")[1] for stack in stacks]
        assert ['"id": "a"' in names[0], '"id": "b"' in names[1]] == [True, True]
        assert [stack.metrics()["executors_adopted_total"] for stack in stacks] == [1, 1]
    finally:
        for stack in stacks:
            stack.stop()


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["gateway", "scheduler", "executor"]))
)
def test_the_processes_wait_for_one_another_in_any_order(tmp_path, order):
    requests, steps = f"ipc://{tmp_path}/requests.ipc", f"ipc://{tmp_path}/steps.ipc"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = {
        "gateway": ["--model=toy", f"--port={port}", f"--request-endpoint={requests}"],
        "scheduler": [f"--request-endpoint={requests}", f"--step-endpoint={steps}"],
        "executor": ["--model=toy", f"--step-endpoint={steps}"],
    }
    said = {
        "gateway": lambda: fetch(url + "/health/live")[0] == 200,
        "scheduler": lambda: (tmp_path / "steps.ipc").is_socket(),
        "executor": lambda: "executor_ready" in (tmp_path / "executor.txt").read_text(),
    }
    started = []
    try:
        for name in order:
            if "gateway" in order[: len(started)]:
                status, body = fetch(url + "/health/ready")
                assert (status, "waiting" in json.loads(body)["phase"]) == (503, True)
            with (tmp_path / f"{name}.txt").open("w") as log:
                started.append(splitflap(name, *flags[name], log=log))
            until(said[name], f"{name} has come up")
        until(lambda: fetch(url + "/health/ready")[0] == 200, "ready once all are there")
    finally:
        for process in started:
            process.terminate()
        assert [process.wait(30) for process in started] == [0] * len(started)
    assert sockets_in(tmp_path) == []


def test_a_busy_port_is_a_clear_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in ("up", "gateway"):
            process = splitflap(command, "--model=toy", f"--port={port}")
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 2
            assert f"cannot listen on 127.0.0.1:{port}" in said
            assert "--port" in said
            assert "Traceback" not in said


def test_a_second_scheduler_on_the_same_socket_is_refused(tmp_path):
    stack = start(tmp_path, "--model", "toy")
    try:
        (endpoint,) = (path for path in sockets_in(tmp_path) if path.name == "requests.ipc")
        second = splitflap(
            "scheduler",
            f"--request-endpoint=ipc://{endpoint}",
            f"--step-endpoint=ipc://{tmp_path}/s",
        )
        said, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "another process listens there" in said
        assert fetch(stack.url + "/health/ready")[0] == 200
    finally:
        stack.stop()


def test_a_model_length_that_cannot_fit_ends_the_start_with_numbers(tmp_path):
    process = splitflap(
        "up", "--model=toy", f"--port={free_port()}", "--max-model-len=4096",
        "--num-gpu-blocks-override=10", env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--max-model-len" in said
    assert "160" in said  # ten blocks of sixteen tokens
    assert sockets_in(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "flags", "complaint"),
    [
        ("up", ["--no-such-flag"], "--no-such-flag"),
        ("up", ["--model", "/nowhere"], "no such file or folder"),
        ("executor", ["--dtype", "int3"], "--dtype"),
        ("scheduler", ["--request-endpoint", "tcp://0.0.0.0:5555"], "loopback"),
        ("gateway", ["--request-endpoint", "tcp://10.1.2.3:5555"], "loopback"),
        ("gateway", ["--request-endpoint", "nonsense"], "use ipc"),
        ("executor", ["--step-endpoint", "tcp://10.1.2.3:5555"], "loopback"),
        ("up", ["--metrics-port", "9000"], "--scheduler-metrics-port"),
        ("up", ["--model", "toy", "--host", "a..b"], "--host a..b: is no address"),
        ("up", ["--model", "toy", "--host", "nonsense.invalid"], "--host nonsense.invalid"),
        ("fly", [], "no such command"),
    ],
)
def test_what_cannot_start_says_why(command, flags, complaint):
    process = splitflap(command, *flags)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complaint in said
    assert "Traceback" not in said


def test_a_child_that_dies_is_started_again_and_a_stream_goes_on(tmp_path):
    stack = start(tmp_path, "--model", "toy", "--toy-step-ms", "20")
    try:
        wish = {"prompt": "over and over", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        whole = complete(stack, **wish)["choices"][0]["text"]
        pieces = stream(stack, **wish)
        first = [next(pieces) for _ in range(10)]
        stack.children()["executor"].kill()
        assert "".join(first + list(pieces)) == whole
        assert stack.metrics()["executors_adopted_total"] == 2
        until(stack.is_idle, "idle again")
    finally:
        stack.stop()
