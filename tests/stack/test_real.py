"""The real processes with the real model."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.stack.client import complete, post, stream
from tests.stack.stack import start, until

pytestmark = [pytest.mark.stack, pytest.mark.model]

FRANCE = {
    "messages": [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ]
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("real"), "--num-gpu-blocks-override", "40", "--max-model-len", "512"
    )
    yield stack
    stack.stop()


def test_it_says_paris_piece_by_piece(real):
    pieces = list(stream(real, "/v1/chat/completions", **FRANCE, temperature=0, max_tokens=30))
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 4


def test_its_start_was_told_by_phase(real):
    said = real.log.read_text()
    assert "loading weights" in said
    assert "pool: 40 blocks of 16 tokens = 640 tokens, 1.2 requests of 512" in said


def test_the_official_client_reads_its_stream(real):
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model="smollm2-135m-instruct", **FRANCE, temperature=0, max_tokens=30, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 4


def test_its_likeliest_answers_make_sense_too(real):
    """Three beams; all of them know the capital, and none says what another one says."""
    beams = {"use_beam_search": True, "n": 3, "max_tokens": 30, "logprobs": True}
    status, _, text = post(real, "/v1/chat/completions", FRANCE | beams)
    assert status == 200, text
    choices = json.loads(text)["choices"]
    said = [choice["message"]["content"] for choice in choices]
    assert all("Paris" in answer for answer in said), said
    assert len(set(said)) == 3
    scores = [
        sum(token["logprob"] for token in content) / len(content)
        for content in (choice["logprobs"]["content"] for choice in choices)
    ]
    assert scores == sorted(scores, reverse=True)
    until(real.is_idle, "idle")


def test_it_gives_way_and_comes_back(real):
    def times_given_way():
        told = real.metrics()
        return sum(told[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))

    before = times_given_way()
    wish = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        prompts = [f"Write about the number {number}." for number in range(6)]
        answers = list(pool.map(lambda prompt: complete(real, prompt=prompt, **wish), prompts))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [150] * 6
    assert times_given_way() > before
    until(real.is_idle, "idle")
