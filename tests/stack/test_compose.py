"""docker-compose.yml as it stands: images, proxy, gateways that come and go, Prometheus."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import post, stream
from tests.stack.compose import SEEN_WITHIN_S, compose_command, project
from tests.stack.gateways import ask, go_on
from tests.stack.stack import until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

QUESTION = "What is the capital of France? Answer in one sentence."
KEY = "sk-compose"
COMPLETIONS = "/v1/completions"
RESUMABLE = {"stream": True, "stream_options": {"resumable": True, "include_usage": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    command = compose_command()
    if command is None:
        pytest.skip("no container engine: neither `docker compose` nor `podman-compose` works here")
    with project(command, tmp_path_factory.mktemp("compose"), f"SPLITFLAP_API_KEY={KEY}\n") as up:
        yield up


def chat(server, **wish):
    """The text deltas of a streamed chat."""
    return stream(
        server, "/v1/chat/completions", {"Authorization": f"Bearer {KEY}"},
        messages=[{"role": "user", "content": QUESTION}], temperature=0, **wish,
    )  # fmt: skip


def chats_at_once(server, num_chats):
    with ThreadPoolExecutor(num_chats) as pool:
        return list(pool.map(lambda _: "".join(chat(server)), range(num_chats)))


def test_a_chat_streams_through_the_proxy(server):
    arrived = [(time.monotonic(), text) for text in chat(server)]
    assert "Paris" in "".join(text for _, text in arrived)
    assert arrived[-1][0] > arrived[0][0] + 0.02, "token by token, not all at the end"


def test_the_proxy_leaves_errors_to_the_gateway(server):
    assert post(server, "/v1/chat/completions", {})[0] == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    status, _, text = post(server, COMPLETIONS, b"x" * (5 * 2**20), headers)
    assert (status, "max-body-bytes" in text or "body" in text) == (413, True)


def test_prometheus_watches_every_process(server):
    for job, number in (("gateway", 2), ("scheduler", 1), ("executor", 1)):
        until(lambda: server.num_up(job) == number, f"{number} of {job} up", SEEN_WITHIN_S)  # noqa: B023
    until(
        lambda: [value for _, value in server.asked("splitflap:executor_up")] == [1],
        "the scheduler has an executor",
        SEEN_WITHIN_S,
    )


def test_gateways_scale_and_each_gets_its_share(server):
    def have_served():
        path = '{path="/v1/chat/completions",status="200"}'
        return len(server.asked(f"splitflap:http_requests_total{path} > 0"))

    server.scale(4)
    until(
        lambda: chats_at_once(server, 8) and have_served() == 4,
        "each of four gateways has answered",
        SEEN_WITHIN_S,
    )


def test_a_killed_gateway_leaves_the_rest_serving(server):
    """Its streams go on at others; what was asked in one piece ends, and is not asked twice."""
    server.scale(4)
    headers = {"Authorization": f"Bearer {KEY}"}
    wish = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    before = server.metric("scheduler", "prompt_tokens_total")
    cut = ask(server, "POST", COMPLETIONS, {**wish, **RESUMABLE}, headers).read(4)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(post, server, COMPLETIONS, wish, headers)
        until(lambda: server.metric("gateway", "open_requests") == 2, "both are there")
        for gateway in server.containers(service="gateway"):
            if server.metric_of(gateway, "open_requests"):
                server.engine("kill", gateway)
        status, _, told = whole.result()
    assert (status, json.loads(told)["error"]["code"]) == (502, "gateway_lost")
    assert not cut.read().is_done
    assert 2 <= len(server.containers(service="gateway")) <= 3
    rest = go_on(server, cut, **headers).read()
    assert rest.is_done
    assert rest.chunks[-1]["usage"]["completion_tokens"] == 400
    each = rest.chunks[-1]["usage"]["prompt_tokens"]
    assert server.metric("scheduler", "prompt_tokens_total") == before + 2 * each
    answers = chats_at_once(server, 8)
    assert len(set(answers)) == 1
    assert "Paris" in answers[0]
