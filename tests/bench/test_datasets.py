"""vLLM's data sets: how many, how long, what they share, and what is refused."""

import json

import pytest

from services.bench.datasets import (
    burstgpt_requests,
    prefix_repetition_requests,
    random_requests,
    sharegpt_requests,
)
from services.bench.tokens import Tokens
from services.gateway.tokenizer import ToyTokenizer
from shared.errors import StartError
from tests.bench.tiny_tokens import tiny_tokens

TOKENS = Tokens(ToyTokenizer())


def random_set(tokens=TOKENS, seed=0, count=20, **wish):
    wish = {"prefix_len": 0, "input_len": 40, "output_len": 10, "range_ratio": 0.0} | wish
    return random_requests(count, seed, tokens, **wish)


def test_random_prompts_have_the_asked_length(tmp_path):
    tokens = tiny_tokens(tmp_path)
    plans = random_set(tokens)
    assert [len(tokens.encode(plan.text)) for plan in plans] == [40] * 20
    assert [plan.max_tokens for plan in plans] == [10] * 20
    assert len({plan.text for plan in plans}) == 20


def test_random_lengths_stay_in_their_range():
    plans = random_set(range_ratio=0.5, count=200)
    lengths = {plan.prompt_tokens for plan in plans}
    assert min(lengths) >= 20
    assert max(lengths) <= 60
    assert len(lengths) > 20
    assert {plan.max_tokens for plan in plans} == set(range(5, 16))


def test_random_prompts_share_their_prefix():
    plans = random_set(prefix_len=30)
    assert len({plan.text[:30] for plan in plans}) == 1
    assert plans[0].prompt_tokens == 70


def test_a_seed_is_a_set():
    assert random_set(seed=1) == random_set(seed=1)
    assert random_set(seed=1) != random_set(seed=2)


def test_prefixes_repeat():
    plans = prefix_repetition_requests(
        10, 0, TOKENS, prefix_len=16, suffix_len=8, num_prefixes=3, output_len=5
    )
    prefixes = [plan.text[:16] for plan in plans]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3, 4]
    assert len({plan.text for plan in plans}) == 10
    assert {(plan.prompt_tokens, plan.max_tokens) for plan in plans} == {(24, 5)}


def sharegpt(folder, *conversations):
    path = folder / "sharegpt.json"
    entries = [
        {"conversations": [{"from": "human", "value": text} for text in turns]}
        for turns in conversations
    ]
    path.write_text(json.dumps([*entries, {"id": "no turns"}, "nonsense"]))
    return path


def test_sharegpt_takes_first_prompts_and_the_lengths_of_their_answers(tmp_path):
    path = sharegpt(tmp_path, ["a question", "an answer!"], ["alone"], ["hi", "too short"])
    (plan,) = sharegpt_requests(path, 1, 0, TOKENS, output_len=None)
    assert (plan.text, plan.prompt_tokens, plan.max_tokens) == ("a question", 10, 10)


def test_sharegpt_leaves_out_what_is_too_long(tmp_path):
    path = sharegpt(tmp_path, ["x" * 1025, "fine"], ["y" * 1000, "z" * 1049], ["good", "good"])
    plans = sharegpt_requests(path, 3, 0, TOKENS, output_len=None)
    assert [plan.text for plan in plans] == ["good"] * 3


def test_sharegpt_answers_can_be_given_a_length(tmp_path):
    path = sharegpt(tmp_path, ["a question", "no"])
    (plan,) = sharegpt_requests(path, 1, 0, TOKENS, output_len=77)
    assert plan.max_tokens == 77


def test_burstgpt_takes_the_lengths_of_answered_gpt4_requests(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,11,12,23,Conversation log\n"
        "6,GPT-4,21,22,43,Conversation log\n"
        "7,GPT-4,31,0,31,Conversation log\n"
    )
    plans = burstgpt_requests(path, 2, 0, TOKENS)
    assert [(plan.prompt_tokens, plan.max_tokens) for plan in plans] == [(21, 22)] * 2


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "Model\nGPT-4\n", '{"a": 1}', "\xff"])
def test_files_of_another_form_are_refused(tmp_path, content):
    path = tmp_path / "data"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(StartError, match="--dataset-path"):
        sharegpt_requests(path, 1, 0, TOKENS, output_len=None)
    with pytest.raises(StartError, match="--dataset-path"):
        burstgpt_requests(path, 1, 0, TOKENS)
