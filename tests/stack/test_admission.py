"""Who gets in: several gateways on one scheduler, bounded queues, keys."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
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
         "--toy-step-ms", "2", "--num-gpu-blocks-override", "128"),
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
    wish = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    first_words = []

    def timed(gateway, number):
        for _ in stream(gateway, prompt=f"number {number}", **wish):
            first_words.append(number)
            break

    with ThreadPoolExecutor(16) as pool:
        busy = [pool.submit(complete, left, prompt=f"busy {n}", **wish) for n in range(4)]
        until(lambda: left.metrics()["num_requests_running"] == 4, "four run")
        waiting = []
        for number, gateway in enumerate((left, right) * 4):
            waiting.append(pool.submit(timed, gateway, number))
            until(
                lambda n=number: (
                    left.metrics()["num_requests_waiting"] == n + 1
                    or any(one.done() for one in busy)
                ),
                "it waits",
            )
        for one in [*busy, *waiting]:
            one.result()
    # Those of one step may be seen in either order, so groups of four are compared.
    assert [set(first_words[:4]), set(first_words[4:])] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_full_queue_is_a_429_that_says_when_to_come_again(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--max-num-seqs", "1", "--max-num-queued-reqs", "2",
        "--toy-step-ms", "20", "--max-model-len", "512",
    )  # fmt: skip
    wish = {"prompt": "x", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    try:
        with ThreadPoolExecutor(4) as pool:
            taken = [pool.submit(complete, stack, **wish)]
            until(lambda: stack.metrics()["num_requests_running"] == 1, "one runs")
            taken += [pool.submit(complete, stack, **wish) for _ in range(2)]
            until(lambda: stack.metrics()["num_requests_waiting"] == 2, "two wait")
            for extra in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
                status, headers, text = post(stack, "/v1/completions", {**wish, **extra})
                assert status == 429, text
                assert int(headers["Retry-After"]) >= 1
                error = json.loads(text)["error"]
                assert error["code"] == "queue_full"
                assert "2" in error["message"]
                assert "--max-num-queued-reqs" in error["message"]
            texts = [one.result()["choices"][0]["text"] for one in taken]
        assert len(set(texts)) == 1
        until(stack.is_idle, "idle")
        assert complete(stack, **wish)["choices"][0]["text"] == texts[0]
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


def test_keys_guard_everything_but_health_and_stay_secret(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--max-model-len", "256",
        "--api-key", "alpha-secret", "--api-key", "beta-secret",
    )  # fmt: skip
    try:
        wish = {"prompt": "x", "max_tokens": 3}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "alpha-secret"}):
            status, told, text = post(stack, "/v1/completions", wish, headers)
            assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
            assert told["WWW-Authenticate"].startswith("Bearer")
        for key in ("alpha-secret", "beta-secret"):
            headers = {"Authorization": f"Bearer {key}"}
            assert post(stack, "/v1/completions", wish, headers)[0] == 200
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json"):
            assert fetch(stack.url + path)[0] == 401, path
        for path in ("/health", "/health/ready", "/health/live"):
            assert fetch(stack.url + path)[0] == 200, path
        lines = [child.cmdline() for child in psutil.Process(stack.process.pid).children(True)]
        assert lines
        assert not any("secret" in word for line in lines for word in line)
        assert "secret" not in stack.log.read_text()
    finally:
        stack.stop()
