"""Logs hold no word of a client: everything is sent with a mark in it, and no log has the mark."""

import contextlib
import http.client
import json
import socket

import pytest

from services.gateway.key_file import Limits, new_key
from tests.stack.client import post
from tests.stack.stack import fetch, start, until

pytestmark = pytest.mark.stack

MARK = "Zq7Marked"
IN_IDS = ", ".join(str(byte) for byte in MARK.encode()[:4])  # the toy's tokens are bytes

COMPLETION = {"prompt": f"say {MARK}", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": f"say {MARK}"}], "max_tokens": 4}
ASKED = [
    ("/v1/completions", COMPLETION, 200),
    ("/v1/completions", {**COMPLETION, "stream": True}, 200),
    ("/v1/completions", {"prompt": [*MARK.encode()], "max_tokens": 2, "echo": True}, 200),
    ("/v1/completions", {**COMPLETION, "n": 2, "logprobs": 2, "echo": True}, 200),
    ("/v1/completions", {**COMPLETION, "stop": [MARK], "bad_words": [MARK]}, 200),
    ("/v1/completions", {**COMPLETION, "cache_salt": MARK, "user": MARK}, 200),
    ("/v1/completions", {**COMPLETION, "metadata": {MARK: MARK}}, 200),
    ("/v1/completions", {**COMPLETION, "suffix": MARK}, 400),
    ("/v1/completions", {**COMPLETION, MARK: 1}, 400),
    ("/v1/completions", {**COMPLETION, "model": MARK}, 404),
    ("/v1/completions", {**COMPLETION, "max_tokens": MARK}, 400),
    ("/v1/completions", {**COMPLETION, "logit_bias": {MARK: 1}}, 400),
    ("/v1/completions", {**COMPLETION, "stop": [5, MARK]}, 400),
    ("/v1/completions", {"prompt": MARK * 10_000, "max_tokens": 4}, 400),
    ("/v1/completions", {**COMPLETION, "deadline_s": 0.000001}, 408),
    ("/v1/completions", b'{"prompt": "' + MARK.encode(), 400),
    ("/v1/completions", b'{"prompt": "\xff' + MARK.encode() + b'"}', 400),
    ("/v1/completions", f'{{"{MARK}": "{MARK}", "{MARK}": 1}}'.encode(), 400),
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}, 400),
    ("/v1/chat/completions", {"messages": MARK}, 400),
    ("/v1/chat/completions", {**CHAT, "chat_template": MARK}, 400),
    ("/tokenize", {"prompt": MARK}, 200),
    ("/detokenize", {"tokens": [*MARK.encode()]}, 200),
    ("/v1/prefixes", {"prompt": MARK * 10, "name": MARK}, 200),
    ("/v1/prefixes", {"prompt": MARK * 1000, "name": MARK}, 400),
]

NOTICED = {"executor": "executor_lost", "scheduler": "stale_socket_removed"}
"""The word in the log that says that the loss of a process was noticed."""


def raw(stack, sent):
    with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass


@contextlib.contextmanager
def open_stream(stack, headers):
    """A long stream of which the first event has come."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    try:
        body = {"prompt": f"say {MARK}", "max_tokens": 150, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert any(line.startswith(b"data: ") for line in iter(answer.readline, b""))
        yield answer
    finally:
        connection.close()


def test_no_log_has_a_word_of_a_client(tmp_path, monkeypatch):
    alice, entry = new_key("alice", Limits())
    hurried, other = new_key("hurried", Limits(requests_per_minute=1))
    file = tmp_path / "keys.toml"
    file.write_text(entry + other)
    file.chmod(0o600)
    flag_key = f"sk-{MARK}-of-the-flag"
    monkeypatch.setenv("SPLITFLAP_API_KEY", flag_key)
    stack = start(
        tmp_path, "--model", "toy", "--max-model-len", "512", "--toy-step-ms", "20",
        "--log-level", "debug", "--api-key-file", str(file),
        "--num-gpu-blocks-override", "40", "--enable-kv-bill",
    )  # fmt: skip
    headers = {"Authorization": f"Bearer {alice}", "Content-Type": "application/json"}
    try:
        for path, body, expected in ASKED:
            status, _, text = post(stack, path, body, headers)
            assert status == expected, (path, body, text)
        for key in (flag_key, hurried, hurried, f"sk-{MARK}-wrong", MARK):
            sent = {"Authorization": f"Bearer {key}"}
            post(stack, "/v1/completions", COMPLETION, sent)
        for event_id in (MARK, f"cmpl-{MARK}:1"):
            sent = {**headers, "Last-Event-ID": event_id}
            assert post(stack, "/v1/completions", COMPLETION, sent)[0] in (400, 404)
        fetch(f"{stack.url}/v1/models?api_key={alice}&prompt={MARK}")
        raw(stack, f"POST {MARK} {MARK}\r\n{MARK}\r\n\r\n{MARK}".encode())
        raw(stack, f"POST /v1/completions HTTP/1.1\r\nContent-Length: x{MARK}\r\n\r\n".encode())
        raw(
            stack,
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alice}\r\n"
            f"Content-Type: application/json\r\nContent-Length: 999\r\n\r\n{MARK}".encode(),
        )
        with open_stream(stack, headers):
            pass  # the client leaves
        for name in NOTICED:
            with open_stream(stack, headers) as answer:
                stack.children()[name].kill()
                assert answer.read().endswith(b"data: [DONE]\n\n")
            word = NOTICED[name]
            until(lambda word=word: word in stack.log.read_text(), word)
            until(lambda: fetch(stack.url + "/health/ready")[0] == 200, "ready again")
        with open_stream(stack, headers):
            stack.stop()
    finally:
        stack.stop()
    log = stack.log.read_text()
    said = {"request_finished", "child_started", "child_died", "draining", *NOTICED.values()}
    assert {word for word in said if word not in log} == set()
    assert "debug" in log
    for secret in (MARK, IN_IDS, alice, hurried, flag_key):
        lines = [line for line in log.splitlines() if secret in line]
        assert not lines, (secret, lines[:3])
