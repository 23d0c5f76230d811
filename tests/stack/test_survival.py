"""Processes killed under load: every stream is told as if nothing had happened.

Streams of every kind run at once. What each tells is compared, to the token, with what it tells
undisturbed; that the blow met work under way is asserted too.
"""

import http.client
import json

import pytest

from tests.stack.client import post
from tests.stack.gateways import ask
from tests.stack.stack import counted, fetch, start, until, wait_ready
from tests.stack.travelling import LONG, Load, calm_answers, wishes

pytestmark = pytest.mark.stack

PREFIX = [*range(40, 73)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("survival"), "--model", "toy", "--toy-step-ms", "15",
        "--max-model-len", "4096", "--num-gpu-blocks-override", "2000",
        "--max-num-batched-tokens", "64",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def asked(stack):
    pinned = {**LONG, "prompt": [*PREFIX, 100], "return_token_ids": True}
    return {**wishes(stack), "behind a pinned prefix": ("/v1/completions", pinned)}


@pytest.fixture(scope="module")
def calm(stack, asked):
    return calm_answers(stack, asked)


@pytest.fixture(autouse=True)
def nothing_is_left(stack):
    wait_ready(stack)
    yield
    until(stack.is_idle, "idle")
    assert stack.unheld() == 2000


def changed(before, after):
    return {name for name in before if before[name].pid != after[name].pid}


@pytest.mark.parametrize("names", [["executor"], ["scheduler"], ["scheduler", "executor"]])
def test_killed_in_the_middle_of_everything(stack, asked, calm, names):
    status, _, text = post(stack, "/v1/prefixes", {"prompt": PREFIX, "name": "system"})
    assert status == 200, text
    pin_id = json.loads(text)["id"]
    before, told_before = stack.children(), stack.metrics()
    load = Load([stack], asked)
    until(load.are_all_under_way, "all are told something")
    assert stack.metrics()["num_requests_running"] >= len(asked)
    for name in names:
        before[name].kill()
    assert load.results() == calm
    assert [len(one.readers) for one in load.travellers] == [1] * len(asked), "no client noticed"
    assert changed(before, stack.children()) == set(names)
    metrics = stack.metrics()
    if names == ["executor"]:
        assert metrics["steps_lost_total"] - told_before["steps_lost_total"] >= 1
        assert metrics["executors_adopted_total"] == told_before["executors_adopted_total"] + 1
    else:
        assert metrics["requests_accepted_total"] == len(asked) + 1, "all were given to the next"
    (pin,) = json.loads(fetch(stack.url + "/v1/prefixes")[1])["data"]
    assert (pin["id"], pin["status"], pin["hits"] > 0) == (pin_id, "ready", True)
    delete(stack, pin_id)


def delete(stack, pin_id):
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    connection.request("DELETE", f"/v1/prefixes/{pin_id}")
    assert connection.getresponse().status == 200
    connection.close()


def test_the_executor_killed_in_prefill(stack):
    """2,000 tokens are 32 steps of 64; it dies before anybody has a first token."""
    prompt = [33 + at % 90 for at in range(2000)]
    fields = {"prompt": prompt, "n": 2, "seed": 5, "max_tokens": 40, "ignore_eos": True,
              "cache_salt": "calm", "logprobs": 1}  # fmt: skip
    calm = calm_answers(stack, {"long": ("/v1/completions", fields)})
    again = {"long": ("/v1/completions", {**fields, "cache_salt": "killed"})}
    with counted(stack) as grown:
        began = stack.metrics()
        load = Load([stack], again)
        until(
            lambda: stack.metrics()["computed_tokens_total"] > began["computed_tokens_total"] + 300,
            "it is in its prefill",
        )
        now = stack.metrics()
        stack.children()["executor"].kill()
        assert now["generation_tokens_total"] == began["generation_tokens_total"], "no token yet"
        assert load.results() == calm
    assert grown["steps_lost_total"] >= 1
    assert grown["executor_restarts_total"] == 1
    assert grown["computed_tokens_total"] > 2000 + 300, "its prompt was computed again"


def test_clients_that_leave_while_there_is_no_executor_leave_nothing(stack, asked):
    """Half of them go in the outage; their blocks come back, and the others lose no token."""
    stay = {name: asked[name] for name in ("several answers", "a stop string")}
    calm = calm_answers(stack, stay)
    with counted(stack) as grown:
        load = Load([stack], stay)
        path, wish = asked["greedy"]
        leaving = [ask(stack, "POST", path, {**wish, "stream": True}).read(3) for _ in range(6)]
        until(load.are_all_under_way, "all are told something")
        stack.children()["executor"].kill()
        until(lambda: stack.metrics()["executor_up"] == 0, "there is none")
        assert stack.metrics()["num_requests_waiting"] == len(leaving) + len(stay)
        for reader in leaving:
            reader.close()
        assert load.results() == calm
        until(stack.is_idle, "idle")
    assert grown["requests_cancelled_total"] == len(leaving)
    assert grown["steps_lost_total"] >= 1
