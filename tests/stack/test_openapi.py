"""/openapi.json and the server agree: schemathesis reads the one and asks the other.

All its checks are on but one: `positive_data_acceptance` is replaced by ours, which knows the rules
between fields that a schema cannot say, and lets nothing else pass (`openapi_checks.py`).
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.stack.stack import fetch, start, until

pytestmark = pytest.mark.stack

CHECKS = str(Path(__file__).with_name("openapi_checks.py"))
KEY = "sk-for-schemathesis"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("openapi"), "--model", "toy", "--num-gpu-blocks-override", "64",
        "--max-model-len", "512", "--api-key", KEY,
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.mark.timeout(660)
def test_what_the_document_says_is_what_the_server_does(toy, tmp_path) -> None:
    run = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", toy.url + "/openapi.json",
            "--header", f"Authorization: Bearer {KEY}",
            "--checks", "all", "--exclude-checks", "positive_data_acceptance",
            "--mode", "all", "--phases", "coverage,fuzzing", "--max-examples", "25",
            "--generation-deterministic", "--no-color",
        ],
        env={**os.environ, "SCHEMATHESIS_HOOKS": CHECKS},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "Tested: 16" in run.stdout, run.stdout[-3000:]


def asked(stack, method, path):
    """The JSON answer to this, with the key."""
    request = urllib.request.Request(stack.url + path, method=method)
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_nothing_of_all_that_is_left(toy) -> None:
    """Nothing but prefixes, which stay until they are deleted."""
    pinned = asked(toy, "GET", "/v1/prefixes")["data"]
    assert pinned
    for prefix in pinned:
        assert asked(toy, "DELETE", f"/v1/prefixes/{prefix['id']}")["deleted"]
    until(toy.is_idle, "idle")
    assert toy.unheld() == 64
    assert fetch(toy.url + "/health/ready")[0] == 200
