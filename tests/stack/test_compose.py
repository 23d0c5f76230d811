"""docker-compose.yml as it stands: images, proxy, gateways that come and go, Prometheus."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import post, stream
from tests.stack.compose import SEEN_WITHIN_S, compose_command, project
from tests.stack.stack import until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

QUESTION = "What is the capital of France? Answer in one sentence."
KEY = "sk-compose"


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
    status, _, text = post(server, "/v1/completions", b"x" * (5 * 2**20), headers)
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
    server.scale(4)
    gone = server.containers(service="gateway")[0]
    server.engine("kill", gone)
    assert gone not in server.containers(service="gateway")
    answers = chats_at_once(server, 8)
    assert len(set(answers)) == 1
    assert "Paris" in answers[0]
