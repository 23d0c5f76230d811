"""A plain HTTP client for stack tests; the official one has a test file of its own."""

import contextlib
import http.client
import json

from tests.stack.stack import events


def post(stack, path, body, headers=None, timeout=120):
    """(status, headers, text) of a POST of `body` (JSON-encoded unless it is bytes)."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=timeout)
    try:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            "POST", path, raw, {"Content-Type": "application/json", **(headers or {})}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def complete(stack, **wish):
    """A completion, not streamed."""
    status, _, text = post(stack, "/v1/completions", wish)
    assert status == 200, text
    return json.loads(text)


def stream(stack, path="/v1/completions", headers=None, **wish):
    """The text deltas of a streamed completion, as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)
    try:
        body = json.dumps({**wish, "stream": True})
        connection.request(
            "POST", path, body, {"Content-Type": "application/json", **(headers or {})}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while line := answer.readline():
            for event in events(line.decode()):
                if event == "[DONE]":
                    return
                assert "error" not in event, event
                for choice in event["choices"]:
                    text = choice.get("text") or choice.get("delta", {}).get("content")
                    if text:
                        yield text
        raise AssertionError("the stream ended without [DONE]")
    finally:
        connection.close()


@contextlib.contextmanager
def open_stream(stack, headers=None, **wish):
    """The events of a streamed completion as they come; leaving the block closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)
    try:
        body = json.dumps({**wish, "stream": True})
        connection.request(
            "POST", "/v1/completions", body,
            {"Content-Type": "application/json", **(headers or {})},
        )  # fmt: skip
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield (event for line in iter(answer.readline, b"") for event in events(line.decode()))
    finally:
        connection.close()
