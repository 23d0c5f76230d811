"""Pinned prefixes through the real processes: shared, computed again after losses, let go."""

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import complete, post
from tests.stack.stack import counted, fetch, start, until

pytestmark = pytest.mark.stack

PREFIX = [*range(40, 73)]  # two blocks of sixteen, and one token of a third


@pytest.fixture(params=["--enable-prefix-caching", "--no-enable-prefix-caching"])
def stack(request, tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--toy-step-ms", "2", "--num-gpu-blocks-override", "64",
        request.param,
    )  # fmt: skip
    yield stack
    stack.stop()


def pin(stack, **fields):
    status, _, text = post(stack, "/v1/prefixes", fields)
    assert status == 200, text
    return json.loads(text)


def listed(stack):
    return json.loads(fetch(stack.url + "/v1/prefixes")[1])["data"]


def delete(stack, pin_id):
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    try:
        connection.request("DELETE", f"/v1/prefixes/{pin_id}")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def ask(stack, number):
    return complete(stack, prompt=[*PREFIX, 100 + number], max_tokens=20, temperature=0)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(stack, name):
    children = stack.children()
    children[name].send_signal(signal.SIGKILL)
    until(lambda: stack.children().get(name, children[name]) != children[name], "another one")


def test_a_prefix_is_shared_survives_both_other_processes_and_is_let_go(stack):
    plain = [ask(stack, number)["choices"][0]["text"] for number in range(4)]
    told = pin(stack, prompt=PREFIX, name="system")
    assert (told["status"], told["num_tokens"], told["num_blocks"]) == ("ready", 33, 3)
    assert stack.blocks()["pinned"] == 3

    with counted(stack) as grown, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: ask(stack, number), range(4)))
    assert [cached(answer) for answer in answers] == [33] * 4, "its third block's token too"
    assert [answer["choices"][0]["text"] for answer in answers] == plain
    assert grown["cow_copies_total"] == grown["pinned_prefix_hits_total"] == 4
    assert listed(stack)[0]["hits"] == 4

    for name in ("executor", "scheduler"):
        with ThreadPoolExecutor(4) as pool:
            kill(stack, name)
            asked = [pool.submit(ask, stack, number) for number in range(4)]
            answers = [one.result() for one in asked]
        assert [cached(answer) for answer in answers] == [33] * 4, "it came before all of them"
        assert [answer["choices"][0]["text"] for answer in answers] == plain
        assert [(one["id"], one["status"]) for one in listed(stack)] == [(told["id"], "ready")]

    assert delete(stack, told["id"])[1]["deleted"] is True
    until(lambda: stack.is_idle() and stack.blocks()["pinned"] == 0, "all blocks free")
    assert stack.unheld() == 64
    assert listed(stack) == []
    assert delete(stack, told["id"])[0] == 404


def test_what_is_over_the_budget_is_refused_and_requests_fit_beside_the_pins(tmp_path):
    stack = start(tmp_path, "--model", "toy", "--num-gpu-blocks-override", "64",
                  "--max-pinned-share", "0.1")  # fmt: skip
    try:
        pin(stack, prompt=[5] * 96)  # six blocks: all of the budget
        status, _, text = post(stack, "/v1/prefixes", {"prompt": [7]})
        error = json.loads(text)["error"]
        assert (status, error["code"]) == (400, "prefix_budget_exceeded")
        assert "at most 6 of 64 may be pinned (--max-pinned-share 0.1)" in error["message"]
        wish = {"prompt": [9], "temperature": 0, "ignore_eos": True}
        status, _, text = post(stack, "/v1/completions", {**wish, "max_tokens": 58 * 16 + 1})
        assert status == 400
        assert "has 64, 6 of them for pinned prefixes" in json.loads(text)["error"]["message"]
        answer = complete(stack, **wish, max_tokens=58 * 16)
        assert answer["usage"]["completion_tokens"] == 58 * 16
    finally:
        stack.stop()
