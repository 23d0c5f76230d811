"""The real processes with the real model in int8: it knows its capitals, alone and in company."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import post
from tests.stack.stack import start, until

pytestmark = [pytest.mark.stack, pytest.mark.model]

COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Greece")


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("int8"), "--quantization", "int8", "--kv-cache-dtype", "int8",
        "--num-gpu-blocks-override", "60", "--max-model-len", "512",
        "--no-enable-prefix-caching",
    )  # fmt: skip
    yield stack
    stack.stop()


def capital(stack, country):
    """What it says is the capital."""
    question = f"What is the capital of {country}? Answer in one sentence."
    body = {
        "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 30,
    }  # fmt: skip
    status, _, text = post(stack, "/v1/chat/completions", body)
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]["content"]


def test_it_says_what_its_weights_are(int8):
    said = int8.log.read_text()
    assert "quantization=int8" in said
    assert "kv_dtype=int8" in said


def test_it_answers_paris_and_everything_alike_alone_and_in_company(int8):
    alone = [capital(int8, country) for country in COUNTRIES]
    assert "Paris" in alone[0]
    with ThreadPoolExecutor(len(COUNTRIES)) as clients:
        together = list(clients.map(lambda country: capital(int8, country), COUNTRIES))
    assert together == alone
    assert len(set(alone)) == len(COUNTRIES)
    until(int8.is_idle, "idle")
