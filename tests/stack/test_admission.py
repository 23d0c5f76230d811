"""Who gets in: several gateways on one scheduler, bounded queues."""

import http.client
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.stack.client import complete, post, stream
from tests.stack.stack import ROOT, fetch, free_port, start, until

pytestmark = pytest.mark.stack


def process(folder, name, *flags):
    """One of our processes, its log in `folder`."""
    with (folder / f"{name}-{flags[-1]}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", name, *flags], cwd=ROOT, stdout=log, stderr=log
        )


@pytest.fixture
def two_gateways(tmp_path):
    """Two gateways, one scheduler, one toy executor; yields a client's view of each gateway."""
    requests, steps = f"ipc://{tmp_path}/r", f"ipc://{tmp_path}/s"
    ports, metrics_port = (free_port(), free_port()), free_port()
    link = ("--request-endpoint", requests)
    commands = [
        ("scheduler", *link, "--step-endpoint", steps, "--max-num-seqs", "4",
         "--metrics-port", str(metrics_port)),
        ("executor", "--model", "toy", "--step-endpoint", steps, "--max-model-len", "512",
         "--toy-step-ms", "10", "--num-gpu-blocks-override", "128"),
        *[("gateway", "--model", "toy", *link, "--port", str(port)) for port in ports],
    ]  # fmt: skip
    with ExitStack() as running:
        stacks = []
        for command in commands:
            child = running.enter_context(process(tmp_path, *command))
            running.callback(child.terminate)
        for port in ports:
            stacks.append(_Gateway(port, metrics_port))
            until(stacks[-1].is_ready, "ready", 60)
        yield stacks
        until(lambda: stacks[0].metrics()["num_requests_running"] == 0, "idle")


class _Gateway:
    """What tests.stack.client needs of a stack."""

    def __init__(self, port, metrics_port):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def is_ready(self):
        return fetch(self.url + "/health/ready")[0] == 200

    def metrics(self):
        lines = [line.rsplit(" ", 1) for line in fetch(self._metrics_url)[1].splitlines()]
        return {
            name.removeprefix("splitflap:"): float(value)
            for name, value in [line for line in lines if not line[0].startswith("#")]
        }


def test_two_gateways_share_a_scheduler(two_gateways):
    wish = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    left, _ = two_gateways
    solo = complete(left, prompt="who", **wish)["choices"][0]["text"]
    with ThreadPoolExecutor(16) as pool:
        whole = [pool.submit(complete, g, prompt="who", **wish) for g in two_gateways * 4]
        streams = [
            pool.submit(lambda g: "".join(stream(g, prompt="who", **wish)), g)
            for g in two_gateways * 4
        ]
        texts = [one.result()["choices"][0]["text"] for one in whole]
        texts += [one.result() for one in streams]
    assert texts == [solo] * 16


def test_first_come_first_served_across_gateways(two_gateways):
    """Four run; those who wait start in the order they came, whichever gateway took them."""
    left, right = two_gateways
    wish = {"temperature": 0, "ignore_eos": True}
    first_words = []

    def timed(gateway, number):
        for _ in stream(gateway, prompt=f"number {number}", max_tokens=60, **wish):
            first_words.append(number)
            break

    with ThreadPoolExecutor(16) as pool:
        busy = [
            pool.submit(complete, left, prompt=f"busy {n}", max_tokens=480, **wish)
            for n in range(4)
        ]
        until(lambda: left.metrics()["num_requests_running"] == 4, "four run")
        waiting = []
        for number, gateway in enumerate((left, right) * 4):
            waiting.append(pool.submit(timed, gateway, number))
            until(
                lambda n=number: left.metrics()["num_requests_waiting"] == n + 1,
                "it waits",
            )
        assert not any(one.done() for one in busy), "all eight waited"
        for one in [*busy, *waiting]:
            one.result()
    # Those of one step may be seen in either order, so groups of four are compared.
    assert [set(first_words[:4]), set(first_words[4:])] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_full_queue_is_a_429_that_says_when_to_come_again(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--max-num-seqs", "1", "--max-num-queued-reqs", "2",
        "--toy-step-ms", "20", "--max-model-len", "512",
    )  # fmt: skip
    wish = {"prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    try:
        with ExitStack() as clients:

            def ask():
                client = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)
                clients.callback(client.close)  # which cancels what it asked for
                headers = {"Content-Type": "application/json"}
                client.request("POST", "/v1/completions", json.dumps(wish), headers)

            ask()
            until(lambda: stack.metrics()["num_requests_running"] == 1, "one runs")
            ask()
            ask()
            until(lambda: stack.metrics()["num_requests_waiting"] == 2, "two wait")
            for extra in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
                status, headers, text = post(stack, "/v1/completions", {**wish, **extra})
                assert status == 429, text
                assert int(headers["Retry-After"]) >= 1
                error = json.loads(text)["error"]
                assert error["code"] == "queue_full"
                assert "2" in error["message"]
                assert "--max-num-queued-reqs" in error["message"]
        until(stack.is_idle, "idle")
        assert complete(stack, **{**wish, "max_tokens": 3})["usage"]["completion_tokens"] == 3
    finally:
        stack.stop()


def test_a_list_of_prompts_that_the_queue_cannot_take_leaves_nothing_behind(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--max-num-seqs", "1", "--max-num-queued-reqs", "3",
        "--toy-step-ms", "20", "--max-model-len", "512",
    )  # fmt: skip
    try:
        wish = {"prompt": ["x"] * 20, "max_tokens": 200, "ignore_eos": True}
        assert post(stack, "/v1/completions", wish)[0] == 429
        until(stack.is_idle, "idle")
        assert len(complete(stack, prompt=["x"] * 3, max_tokens=2)["choices"]) == 3
    finally:
        stack.stop()
