"""The real processes with the toy model, whose answers are exact to the last block."""

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import zmq

from shared.codec import encode
from shared.ids import Boot
from shared.messages import Hello
from tests.stack.client import complete, post, stream
from tests.stack.stack import events, fetch, start, until

pytestmark = pytest.mark.stack

NUM_BLOCKS = 64
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("toy"), "--model", "toy",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512",
        "--toy-step-ms", "1", "--request-read-timeout-s", "1",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(toy):
    """After every test the pool is as it was and the server is well."""
    yield
    until(toy.is_idle, f"idle: {toy.blocks()} {toy.log.read_text()[-2000:]}")
    assert toy.unheld() == NUM_BLOCKS
    assert fetch(toy.url + "/health/ready")[0] == 200


def preemptions(stack):
    metrics = stack.metrics()
    return sum(metrics[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))


def solo(stack, prompt, num_tokens):
    answer = complete(stack, prompt=prompt, max_tokens=num_tokens, **GREEDY)
    assert answer["usage"]["completion_tokens"] == num_tokens
    return answer["choices"][0]["text"]


def test_streamed_and_whole_answers_are_the_same(toy):
    pieces = list(stream(toy, prompt="the same", max_tokens=50, **GREEDY))
    assert len(pieces) > 25  # it did stream
    assert "".join(pieces) == solo(toy, "the same", 50)


def test_many_at_once_answer_as_if_alone_though_blocks_run_out(toy):
    prompts = [f"{number} bottles of beer on the wall" for number in range(24)]
    alone = [solo(toy, prompt, 100) for prompt in prompts]
    before = preemptions(toy)
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda prompt: solo(toy, prompt, 100), prompts))
    assert together == alone
    # 24 x (32 + 100) tokens are 216 blocks and more; there are 64: some gave way.
    assert preemptions(toy) > before


def test_three_hundred_streams_cut_after_three_tokens_leave_nothing(toy):  # R22
    def cut(number):
        pieces = stream(toy, prompt=f"cut {number}", max_tokens=400, **GREEDY)
        for _ in range(3):
            next(pieces)
        pieces.close()

    before = toy.metrics()["requests_cancelled_total"]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(cut, range(300)))
    until(toy.is_idle, "idle")
    assert toy.metrics()["requests_cancelled_total"] == before + 300


def test_a_client_that_leaves_before_its_first_token_frees_its_place(toy):
    body = json.dumps({"prompt": "x" * 400, "max_tokens": 100, "stream": True, **GREEDY})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"  # noqa: E501
    accepted, cancelled = (
        toy.metrics()[f"requests_{what}_total"] for what in ("accepted", "cancelled")
    )

    def taken(count):
        return lambda: toy.metrics()["requests_accepted_total"] >= accepted + count

    with ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as clients:
        # 8 x 300 tokens are 150 blocks; there are 64: who comes later waits.
        busy = [pool.submit(solo, toy, f"{number} busy", 300) for number in range(8)]
        until(taken(8), "the busy ones are there")
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", toy.port))
            clients.enter_context(client).sendall((head + body).encode())
        until(taken(28), "all are there")
        assert not all(future.done() for future in busy)
        clients.close()
        assert all(future.result() for future in busy)
    until(lambda: toy.metrics()["requests_cancelled_total"] == cancelled + 20, "all are cancelled")


def test_the_same_request_id_twice_at_once(toy):  # R7
    def ask(_):
        return post(
            toy, "/v1/completions", {"prompt": "twins", "max_tokens": 60, **GREEDY},
            {"X-Request-Id": "dup"},
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, range(2)))
    assert [status for status, _, _ in answers] == [200, 200]
    assert [headers["X-Request-Id"] for _, headers, _ in answers] == ["dup", "dup"]
    first, second = (json.loads(text) for _, _, text in answers)
    assert first["choices"] == second["choices"]
    assert first["id"] != second["id"]


def test_echo_of_nothing_generated(toy):  # R6
    answer = complete(toy, prompt="Hello", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_the_official_client_streams_and_reads_usage(toy):
    client = openai.OpenAI(base_url=toy.url + "/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["toy"]
    wish = {
        "model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20,
        "temperature": 0, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**wish)
    chunks = list(
        client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices == [] for chunk in chunks].count(True) == 1
    first, again = whole.usage.to_dict(), chunks[-1].usage.to_dict()
    assert first.pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert again.pop("prompt_tokens_details") == {"cached_tokens": 16}
    assert again == first
    assert whole.usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    client.close()


def test_a_seed_repeats_and_its_absence_does_not(toy):
    wish = {"prompt": "dice", "max_tokens": 40, "temperature": 1.5, "ignore_eos": True}
    texts = [complete(toy, **wish, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    free = {complete(toy, **wish)["choices"][0]["text"] for _ in range(3)}
    assert len(free) == 3


def test_a_stop_string_never_shows(toy):
    whole = solo(toy, "stop me", 60)
    stop = whole[30:33]
    at = whole.index(stop)
    pieces = list(stream(toy, prompt="stop me", max_tokens=60, stop=[stop], **GREEDY))
    assert "".join(pieces) == whole[:at]


def test_a_prompt_beyond_the_limit_says_both_numbers(toy):  # R20
    status, _, text = post(toy, "/v1/completions", {"prompt": "x" * 3000, "max_tokens": 1})
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "3000" in error["message"]
    assert "512" in error["message"]


BAD = [
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b'{"prompt": "\xff"}', None),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": NaN}', None),
    (b"[" * 100_000, None),
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": 1e308}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "top_k": -7}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": [5]}, "stop"),
    ({"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "x", "no_such_field": 1}, "no_such_field"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_input_is_a_clear_400(toy, body, param):
    status, _, text = post(toy, "/v1/completions", body)
    error = json.loads(text)["error"]
    assert status == 400, text
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None if param is None else error["param"].startswith(param), text
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt-17"}, {}, 404),
        ("/v1/nothing", {"prompt": "x"}, {}, 404),
        ("/v1/models", {"prompt": "x"}, {}, 405),
        ("/v1/completions", b"x" * (17 * 2**20), {}, 413),
        ("/v1/completions", b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415),
    ],
)
def test_every_error_has_openais_form(toy, path, body, headers, expected):
    status, _, text = post(toy, path, body, headers)
    assert status == expected, text
    assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def test_half_a_request_that_hangs_is_closed(toy):
    with socket.create_connection(("127.0.0.1", toy.port), timeout=20) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"prompt": "ha'
        )
        answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")


def test_noise_on_the_sockets_is_dropped_and_counted(toy):
    def dropped():
        metrics = toy.metrics()
        return sum(v for name, v in metrics.items() if name.startswith("messages_dropped_total"))

    before = dropped()
    noise = [b"", b"\xc1", encode(Hello(Boot(1)))[:-1], encode(Hello(Boot(1))).replace(b"H", b"J")]
    with zmq.Context() as context:
        for path in toy.folder.rglob("*.ipc"):
            with context.socket(zmq.DEALER) as peer:
                peer.connect(f"ipc://{path}")
                for frame in noise:
                    peer.send(frame)
                peer.send_multipart([b"a", b"b"])
    until(lambda: dropped() == before + 2 * (len(noise) + 1), "all noise counted")
    assert solo(toy, "still here", 5)


def test_the_answer_of_a_stream_is_whole_sse(toy):
    body = {"prompt": "frames", "max_tokens": 5, "stream": True, **GREEDY}
    status, headers, raw = post(toy, "/v1/completions", body)
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert events(raw)[-1] == "[DONE]"
    assert raw.count("\nid: ") + raw.startswith("id: ") >= 5


def test_threads_of_clients_share_one_gateway(toy):
    answers, lock = {}, threading.Lock()

    def ask(number):
        text = "".join(stream(toy, prompt=f"n{number % 4}", max_tokens=30, **GREEDY))
        with lock:
            answers.setdefault(number % 4, set()).add(text)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(32)))
    assert [len(texts) for texts in answers.values()] == [1, 1, 1, 1]
