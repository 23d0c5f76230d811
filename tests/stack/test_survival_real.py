"""The real model loses its executor: in float32, what is computed again is the same."""

import pytest

from tests.stack.stack import counted, start, until
from tests.stack.travelling import Load, calm_answers

pytestmark = [pytest.mark.stack, pytest.mark.model]

FRANCE = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."},
]
WISHES = {
    "greedy": {"temperature": 0, "messages": FRANCE},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "messages": FRANCE},
}


def test_streams_of_the_real_model_go_on(tmp_path):
    stack = start(
        tmp_path, "--num-gpu-blocks-override", "80", "--max-model-len", "512", "--dtype", "float32"
    )
    length = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    asked = {key: ("/v1/chat/completions", wish | length) for key, wish in WISHES.items()}
    try:
        calm = calm_answers(stack, asked)
        assert all("Paris" in choices[0][0] for choices in calm.values())
        before = stack.children()["executor"]
        with counted(stack) as grown:
            load = Load([stack], asked)
            until(load.are_all_under_way, "all are told something")
            before.kill()
            assert load.results() == calm
        assert grown["steps_lost_total"] >= 1
        assert grown["executors_adopted_total"] == 1
        assert stack.children()["executor"].pid != before.pid
        until(stack.is_idle, "idle")
    finally:
        stack.stop()
