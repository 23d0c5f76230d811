"""`splitflap up` with an API key: the children get it, and ps shows it nowhere."""

import json
import urllib.error
import urllib.request

import psutil
import pytest

from tests.stack.stack import fetch, start

pytestmark = pytest.mark.stack

KEY = "sk-never-seen"


def test_a_key_opens_and_is_never_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITFLAP_API_KEY", f"{KEY},sk-another")
    stack = start(tmp_path, "--model", "toy")
    try:
        assert fetch(stack.url + "/v1/models")[0] == 401
        body = json.dumps({"prompt": "Hi", "max_tokens": 3}).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(stack.url + "/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                urllib.request.Request(stack.url + "/metrics", headers={"Authorization": "x"})
            )
        with refused.value as error:
            assert error.code == 401
        assert set(stack.children()) == {"gateway", "scheduler", "executor"}
        for process in [psutil.Process(stack.process.pid), *stack.children().values()]:
            assert "sk-" not in " ".join(process.cmdline())
        assert "SPLITFLAP_API_KEY" not in stack.children()["executor"].environ()
    finally:
        stack.stop()
    told = stack.log.read_text()
    assert "Authorization: Bearer $SPLITFLAP_API_KEY" in told
    assert "sk-" not in told
