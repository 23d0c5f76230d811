"""`splitflap up` with API keys: they guard all but health, and nobody sees them."""

import json

import psutil
import pytest

from tests.stack.client import post
from tests.stack.stack import fetch, start, until

pytestmark = pytest.mark.stack

KEYS = ("sk-alpha-never-seen", "sk-beta-never-seen")


def test_keys_guard_everything_but_health_and_are_never_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITFLAP_API_KEY", ",".join(KEYS))
    stack = start(tmp_path, "--model", "toy", "--max-model-len", "256")
    try:
        wish = {"prompt": "x", "max_tokens": 3}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}):
            status, told, text = post(stack, "/v1/completions", wish, headers)
            assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
            assert told["WWW-Authenticate"].startswith("Bearer")
        for key in KEYS:
            status, _, text = post(
                stack, "/v1/completions", wish, {"Authorization": f"Bearer {key}"}
            )
            assert status == 200, text
            assert json.loads(text)["usage"]["completion_tokens"] == 3
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json"):
            assert fetch(stack.url + path)[0] == 401, path
        for path in ("/health", "/health/ready", "/health/live"):
            assert fetch(stack.url + path)[0] == 200, path
        children = stack.children()
        assert set(children) == {"gateway", "scheduler", "executor"}
        for process in [psutil.Process(stack.process.pid), *children.values()]:
            assert "sk-" not in " ".join(process.cmdline())
        assert "SPLITFLAP_API_KEY" not in children["executor"].environ()
        until(lambda: "Authorization: Bearer YOUR_KEY" in stack.log.read_text(), "the banner")
    finally:
        stack.stop()
    assert "sk-" not in stack.log.read_text()
