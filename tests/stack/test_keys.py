"""`splitflap up` with API keys and CURVE keys: they guard all but health, and nobody sees them."""

import json
import signal

import psutil
import pytest

from services.gateway.key_file import Limits, new_key
from shared.curve import make_keys
from tests.stack.client import post
from tests.stack.stack import fetch, free_port, start, until

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


def test_keys_of_a_file_with_limits_over_links_with_curve_keys(tmp_path):
    """SIGHUP takes a changed file; a scheduler and an executor that die come back with keys."""
    make_keys(tmp_path / "curve")
    file = tmp_path / "keys.toml"
    alice, entry = new_key("alice", Limits(requests_per_minute=1))
    file.write_text(entry)
    file.chmod(0o600)
    stack = start(
        tmp_path, "--model", "toy", "--max-model-len", "256", "--api-key-file", str(file),
        "--curve-key-dir", str(tmp_path / "curve"),
        "--request-endpoint", f"tcp://0.0.0.0:{free_port()}",
        "--step-endpoint", f"tcp://0.0.0.0:{free_port()}",
    )  # fmt: skip

    def ask(key):
        headers = {"Authorization": f"Bearer {key}"}
        status, told, text = post(
            stack, "/v1/completions", {"prompt": "x", "max_tokens": 3}, headers
        )
        return status, told, json.loads(text)

    try:
        assert [ask(key)[0] for key in ("sk-wrong", alice)] == [401, 200]
        status, told, answer = ask(alice)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(told["Retry-After"]) <= 60
        bob, entry = new_key("bob", Limits())
        file.write_text(entry)
        children = stack.children()
        children["gateway"].send_signal(signal.SIGHUP)
        until(lambda: ask(bob)[0] == 200, "the new key is known")
        assert ask(alice)[0] == 401
        for name in ("scheduler", "executor"):
            children[name].kill()
            until(lambda name=name: stack.children().get(name, children[name]) != children[name],
                  f"another {name}")  # fmt: skip
            until(lambda: fetch(stack.url + "/health/ready")[0] == 200, "ready again")
            assert ask(bob)[0] == 200
    finally:
        stack.stop()
    log = stack.log.read_text()
    assert not [key for key in (alice, bob) if key in log]
    assert "peer_refused" not in log
