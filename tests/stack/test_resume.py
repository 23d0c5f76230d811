"""Streams that outlive their gateway, their client, and a client's patience: real processes.

The toy's tokens are a function of the request alone, so what a cut stream tells in the end must be
what it tells undisturbed, to the byte.
"""

import contextlib
import json
import signal
import socket

import pytest

from tests.stack.client import complete, post
from tests.stack.gateways import ask, gateway, go_on, joined
from tests.stack.stack import counted, fetch, start, until

pytestmark = pytest.mark.stack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a long story", "max_tokens": 150, "ignore_eos": True, "seed": 3}
PENALTIES = {"presence_penalty": 0.4, "repetition_penalty": 1.2}
TALK = [{"role": "user", "content": "tell me"}]
WISHES = {
    "plain": (COMPLETIONS, LONG),
    "several answers": (COMPLETIONS, {**LONG, "n": 2, **PENALTIES}),
    "log-probabilities": (COMPLETIONS, {**LONG, "logprobs": 2, "echo": True}),
    "several prompts": (COMPLETIONS, {**LONG, "prompt": ["one", "two", "three"]}),
    "unseeded": (COMPLETIONS, {**LONG, "seed": None, "max_tokens": 120}),
    "a chat": (CHAT, {**LONG, "prompt": None, "messages": TALK, "return_token_ids": True}),
    "beams": (
        CHAT,
        {"messages": TALK, "max_tokens": 90, "ignore_eos": True, "use_beam_search": True, "n": 2},
    ),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("resume"), "--model", "toy", "--toy-step-ms", "10",
        "--num-gpu-blocks-override", "1000", "--max-model-len", "512", "--stream-ttl", "60",
    )  # fmt: skip
    yield stack
    stack.stop()


def streamed(one, path, wish, **options):
    options = {"include_usage": True, **options}
    return ask(one, "POST", path, {**wish, "stream": True, "stream_options": options})


def with_stop_string(stack):
    """A wish whose answer ends at a stop string in its second half."""
    text = complete(stack, **LONG)["choices"][0]["text"]
    return {**LONG, "stop": [text[90:93]]}


def test_a_gateway_killed_in_mid_stream_costs_no_stream_anything(stack):
    """R-survival: streams of every kind, one kill; each goes on at another gateway."""
    wishes = {**WISHES, "stop string": (COMPLETIONS, with_stop_string(stack))}
    whole = {
        name: joined(streamed(stack, path, wish).read())
        for name, (path, wish) in wishes.items()
        if name != "unseeded"
    }
    with gateway(stack) as first, gateway(stack) as second, counted(stack) as grown:
        cut = {name: streamed(first, path, wish) for name, (path, wish) in wishes.items()}
        for name, reader in cut.items():
            reader.read(1 if name == "beams" else 4)
        assert stack.metrics()["num_requests_running"] >= len(wishes)
        first.process.kill()
        for reader in cut.values():
            reader.read()  # what was on its way
            assert not reader.is_done
        until(lambda: stack.metrics()["detached_streams"] >= len(wishes), "the loss is noticed")
        rest = {}
        for at, (name, reader) in enumerate(cut.items()):
            path, _ = wishes[name]
            if at % 2:
                rest[name] = go_on(second, reader, "POST", path)
            else:
                rest[name] = go_on(second, reader)
        for name, reader in rest.items():
            assert reader.read().is_done, name
        assert second.metric("streams_attached_total") == len(wishes) + 2  # three prompts in one
    assert grown["streams_orphaned_total"] == len(wishes) + 2
    assert grown["streams_attached_total"] == len(wishes) + 2
    for name, told in whole.items():
        assert joined(cut[name], rest[name]) == told, name
        usages = [chunk["usage"] for chunk in rest[name].chunks if chunk.get("usage")]
        assert len(usages) == 1, name
    *_, ends = joined(cut["unseeded"], rest["unseeded"])[0]
    assert ends == [("length", None)]
    assert rest["unseeded"].chunks[-1]["usage"]["completion_tokens"] == 120
    until(stack.is_idle, "idle")
    assert stack.metrics()["detached_streams"] == 0


def test_a_stream_goes_on_while_nobody_reads_it_and_is_there_when_somebody_does(stack):
    whole = joined(streamed(stack, COMPLETIONS, LONG).read())
    cut = streamed(stack, COMPLETIONS, LONG, resumable=True).read(3)
    cut.close()
    until(lambda: stack.metrics()["detached_streams"] == 1, "detached")
    until(lambda: stack.metrics()["num_requests_running"] == 0, "it is over")
    with gateway(stack) as other:
        rest = go_on(other, cut).read()
        assert rest.is_done
        assert joined(cut, rest) == whole
        again = go_on(other, cut).read()  # it was told whole, and is kept for a lost end
        assert joined(again) == joined(rest)
        from_the_start = ask(other, "GET", f"/v1/streams/{cut.last_id.partition(':')[0]}").read()
        assert joined(from_the_start) == whole
    until(lambda: stack.metrics()["detached_streams"] == 1, "kept once more")


def test_a_client_whose_old_connection_still_stands_takes_all_of_its_prompts_along(stack):
    path, wish = WISHES["several prompts"]
    whole = joined(streamed(stack, path, wish).read())
    with counted(stack) as grown:
        cut = streamed(stack, path, wish).read(4)
        chunks, last_id = list(cut.chunks), cut.last_id
        rest = go_on(stack, cut)
        cut.read()
        assert (cut.error, cut.is_done) == ("stream_moved", True)
        assert rest.read().is_done
    cut.chunks, cut.last_id = chunks, last_id
    assert joined(cut, rest) == whole
    assert grown["streams_attached_total"] == 3
    assert grown["requests_cancelled_total"] == 0
    until(stack.is_idle, "idle")


def test_gateway_and_scheduler_killed_at_once_cost_no_stream_whose_client_asks_again(stack):
    """Nobody is left who knows the streams; the clients say again what they had asked."""
    wishes = {name: WISHES[name] for name in ("several answers", "unseeded", "a chat")}
    whole = {
        name: joined(streamed(stack, path, wish).read())
        for name, (path, wish) in wishes.items()
        if name != "unseeded"
    }
    with gateway(stack) as first, gateway(stack) as second:
        cut = {
            name: streamed(first, path, wish, resumable=True).read(4)
            for name, (path, wish) in wishes.items()
        }
        scheduler = stack.children()["scheduler"]
        first.process.kill()
        scheduler.kill()
        for reader in cut.values():
            reader.read()
            assert not reader.is_done
        rest = {name: asked_again(second, cut[name], *wishes[name]) for name in wishes}
        for name, reader in rest.items():
            assert reader.read().is_done, name
        call_id = cut["unseeded"].last_id.partition(":")[0]
        until(lambda: stack.metrics()["detached_streams"] >= 3, "all are kept")
        whole["unseeded"] = joined(ask(second, "GET", f"/v1/streams/{call_id}").read())
    assert scheduler.pid != stack.children()["scheduler"].pid
    for name, told in whole.items():
        assert joined(cut[name], rest[name]) == told, name


def asked_again(one, reader, path, wish):
    """The rest of a stream, its request sent again until the server is up again."""
    options = {"include_usage": True, "resumable": True}
    body = {**wish, "stream": True, "stream_options": options}

    def answered():
        headers = {"Last-Event-ID": reader.last_id}
        return ask(one, "POST", path, body, headers, may_be_away=True)

    return until(answered, "it answers again", 60)


def test_a_client_that_says_nothing_of_coming_back_is_cancelled(stack):
    with counted(stack) as grown:
        cut = streamed(stack, COMPLETIONS, LONG).read(3)
        cut.close()
        until(stack.is_idle, "idle")
    assert grown["requests_cancelled_total"] == 1
    status, body = fetch(f"{stack.url}/v1/streams/{cut.last_id.partition(':')[0]}")
    assert (status, json.loads(body)["error"]["code"]) == (404, "stream_not_found")
    assert "60 s (--stream-ttl)" in body


def test_a_gateway_that_must_leave_hands_its_streams_over(stack):
    wish = {**LONG, "max_tokens": 400}
    whole = joined(streamed(stack, COMPLETIONS, wish).read())
    with gateway(stack, "--shutdown-timeout", "0.5") as first, gateway(stack) as second:
        cut = streamed(first, COMPLETIONS, wish).read(3)
        first.process.send_signal(signal.SIGTERM)
        cut.read()
        assert (cut.error, cut.is_done) == ("gateway_draining", True)
        assert first.process.wait(30) == 0
        rest = go_on(second, cut).read()
        assert rest.is_done
    cut.chunks.pop()
    assert joined(cut, rest) == whole


def test_an_answer_that_is_no_stream_ends_with_its_gateway_and_can_be_asked_again(stack):
    wish = {**LONG, "max_tokens": 400}
    with gateway(stack, "--shutdown-timeout", "0.5") as first:
        with socket.create_connection(("127.0.0.1", first.port)) as client:
            raw = json.dumps(wish).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
            )
            until(lambda: stack.metrics()["num_requests_running"] >= 1, "it runs")
            first.process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer
        assert b'"code": "gateway_draining"' in answer
    until(stack.is_idle, "idle")


def test_a_reader_that_takes_nothing_is_cut_off_and_may_come_back(stack):
    """Its stream is more than all buffers on the way hold: log-probabilities are long."""
    wish = {**LONG, "n": 60, "max_tokens": 120, "logprobs": 20, "temperature": 1.0}
    with gateway(stack, "--slow-reader-timeout-s", "1") as first, gateway(stack) as second:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", first.port))
        raw = json.dumps({**wish, "stream": True}).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
        )
        head = b""
        while b"id: cmpl-" not in head:
            got = client.recv(4096)
            assert got, head
            head += got
        call_id = "cmpl-" + head.partition(b"id: cmpl-")[2][:32].decode()
        name = 'streams_detached_total{reason="slow_reader"}'
        until(lambda: first.metric(name) == 1, "it is cut off", 60)
        client.close()
        assert stack.metrics()["detached_streams"] >= 1
        told = joined(ask(second, "GET", f"/v1/streams/{call_id}").read())
    whole = {choice["index"]: choice["text"] for choice in complete(stack, **wish)["choices"]}
    assert {index: text for index, (text, *_) in told.items()} == whole
    assert {ends[0] for *_, ends in told.values()} == {("length", None)}


def test_nobody_comes_or_comes_with_another_key(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--toy-step-ms", "20", "--num-gpu-blocks-override", "64",
        "--max-model-len", "512", "--stream-ttl", "3", "--api-key", "a", "--api-key", "b",
    )  # fmt: skip
    with contextlib.ExitStack() as exits:
        exits.callback(stack.stop)
        key = {"Authorization": "Bearer a"}
        body = {**LONG, "max_tokens": 400, "stream": True, "stream_options": {"resumable": True}}
        cut = ask(stack, "POST", COMPLETIONS, body, key).read(2)
        cut.close()
        path = f"/v1/streams/{cut.last_id.partition(':')[0]}"
        until(lambda: stack.metrics()["detached_streams"] == 1, "detached")
        with pytest.raises(AssertionError, match=r"404: .*stream_not_found"):
            ask(stack, "GET", path, headers={"Authorization": "Bearer b"})
        again = go_on(stack, cut, Authorization="Bearer a").read(1)
        assert again.chunks
        again.close()
        until(lambda: stack.metrics()["streams_expired_total"] == 1, "expired", 60)
        assert stack.metrics()["num_requests_running"] == 0
        with pytest.raises(AssertionError, match=r"404: .*3 s"):
            ask(stack, "GET", path, headers=key)
        until(stack.is_idle, "idle")
        assert stack.unheld() == 64
        status, _, text = post(stack, COMPLETIONS, b"", {**key, "Last-Event-ID": cut.last_id})
        assert (status, json.loads(text)["error"]["code"]) == (404, "stream_not_found")
