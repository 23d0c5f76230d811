"""The workloads are the same requests everywhere: known hashes, made by another program.

The hashes are of the requests that the load generator behind the published comparison with other
servers builds from the same tokenizer, corpus and seed (its JSON, keys sorted, SHA-256).
"""

import hashlib
import json

import pytest

from services.bench.arrivals import arrival_times_s
from services.bench.tokens import load_tokens
from services.bench.workloads import CORPUS, build_workload, read_paragraphs
from shared.errors import StartError
from tests.bench.tiny_tokens import tiny_tokens

PARAGRAPHS = read_paragraphs(CORPUS)


def as_the_other_program_writes_it(plan):
    fields = {
        "messages": list(plan.messages),
        "max_tokens": plan.max_tokens,
        "n": plan.num_choices,
        "ptok": plan.prompt_tokens,
    }
    if plan.num_choices > 1:
        fields |= {"temperature": plan.temperature, "seed": plan.seed}
    return fields


def digest(plans):
    text = json.dumps([as_the_other_program_writes_it(plan) for plan in plans], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("workload", "count", "seed", "expected"),
    [
        ("A", 12, 1, "578ef7c5e5571772"),
        ("A", 33, 7, "6b6f5baa7e5cf2ae"),
        ("B", 6, 1, "b2b9dc89575592a7"),
        ("C", 4, 1, "b90a2b5bbbe68487"),
        ("A", 2, 987654, "d07b5e43bfba80a1"),
    ],
)
def test_a_small_vocabulary_gives_the_known_requests(tmp_path, workload, count, seed, expected):
    plans = build_workload(workload, count, seed, tiny_tokens(tmp_path), PARAGRAPHS)
    assert digest(plans) == expected


@pytest.mark.model
@pytest.mark.parametrize(
    ("workload", "count", "seed", "expected"),
    [
        ("A", 12, 1, "0ac2729ec78ca5e6"),
        ("A", 33, 7, "4709f2d2b84359a9"),
        ("B", 6, 1, "09ca317da62c3748"),
        ("C", 4, 1, "6518d47ee810c17c"),
        ("A", 2, 987654, "7ffc8d30c2e6c154"),
    ],
)
def test_the_real_vocabulary_gives_the_known_requests(workload, count, seed, expected):
    tokens = load_tokens("smollm2-135m-instruct")
    assert digest(build_workload(workload, count, seed, tokens, PARAGRAPHS)) == expected


@pytest.mark.parametrize("workload", ["A", "B", "C", "L"])
def test_a_longer_run_begins_with_the_shorter_one(tmp_path, workload):
    tokens = tiny_tokens(tmp_path)
    longer = build_workload(workload, 5, 3, tokens, PARAGRAPHS)
    assert build_workload(workload, 2, 3, tokens, PARAGRAPHS) == longer[:2]
    assert build_workload(workload, 2, 4, tokens, PARAGRAPHS) != longer[:2]


def test_the_prefix_of_b_is_shared(tmp_path):
    plans = build_workload("B", 3, 1, tiny_tokens(tmp_path), PARAGRAPHS)
    assert len({plan.messages[0]["content"] for plan in plans}) == 1
    assert len({plan.messages[1]["content"] for plan in plans}) == 3


def test_a_corpus_that_cannot_be_read_is_named(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(StartError, match=r"empty\.txt: holds no text"):
        read_paragraphs(empty)
    with pytest.raises(StartError, match=r"nowhere\.txt: cannot be read"):
        read_paragraphs(tmp_path / "nowhere.txt")


def test_poisson_arrivals_are_the_known_ones():
    times = arrival_times_s(4, rate=2.0, burstiness=1, seed=3)
    assert times == [0.13679991529660582, 0.547294179861582, 1.0187563630291594, 1.2724605606923949]


@pytest.mark.parametrize("burstiness", [0.3, 1, 5])
def test_arrivals_come_at_the_rate_and_as_bursty_as_asked(burstiness):
    times = arrival_times_s(20_000, rate=4.0, burstiness=burstiness, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times_s(3, rate=float("inf"), burstiness=1, seed=0) == [0, 0, 0]
