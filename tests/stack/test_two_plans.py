"""Two plans in flight through the real processes: what is answered is what one plan answers.

The other stack runs one plan at a time, has no cache, and blocks enough for everybody.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import complete, open_stream
from tests.stack.stack import counted, start, until

pytestmark = pytest.mark.stack

NUM_BLOCKS = 64
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512")
FULL_LENGTH = {"max_tokens": 60, "ignore_eos": True}
FOUR = {"n": 4, "seed": 7, "temperature": 1, **FULL_LENGTH}


def started(folder, *flags):
    return start(folder, "--model", "toy", "--preemption-mode", "swap", *flags)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    stack = started(
        tmp_path_factory.mktemp("one"), "--plans-in-flight", "1", "--no-enable-prefix-caching",
        "--num-gpu-blocks-override", "2048", "--max-model-len", "512",
    )  # fmt: skip
    yield stack
    assert preemptions(stack.metrics()) == 0
    assert stack.metrics()["prefix_cache_hits_total"] == 0
    stack.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    stack = started(folder, "--plans-in-flight", "2", "--toy-step-ms", "3", *SMALL)
    yield stack
    stack.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(two):
    yield
    until(two.is_idle, "idle")
    assert two.unheld() == NUM_BLOCKS
    assert two.metrics()["cpu_cache_usage_perc"] == 0


def preemptions(metrics):
    return sum(metrics[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def told(stack, wish):
    """What a client is told, but for what was cached: choices and the counts of tokens."""
    answer = complete(stack, **wish)
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def ids_of(name, count):
    return [*name.encode(), *[32 + (number * 7) % 90 for number in range(count - len(name))]]


LIST = {"prompt": [f"one of {number}" for number in range(6)], "n": 2, "logprobs": 2, "echo": True}
FEATURES = {
    "greedy": {"prompt": "the plain way", "temperature": 0, **FULL_LENGTH},
    "to the end of text": {"prompt": "until it ends", "seed": 5, "max_tokens": 400},
    "four": {"prompt": ids_of("four", 33), **FOUR},
    "the best of four": {"prompt": "best", **FOUR, "n": 2, "best_of": 4},
    "logprobs": {"prompt": "likely", **FOUR, "logprobs": 5},
    "penalties": {
        "prompt": "again and again", **FOUR, "presence_penalty": 1.5, "frequency_penalty": 1.2,
        "repetition_penalty": 1.3,
    },
    "bias and bounds": {
        "prompt": "bounded", **FOUR, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
        "logit_bias": {"65": 3},
    },
    "a list": {**LIST, "seed": 3, "max_tokens": 30, "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("wish", FEATURES.values(), ids=FEATURES.keys())
def test_each_wish_is_answered_as_with_one_plan(one, two, wish):
    assert told(two, wish) == told(one, wish)


def test_penalties_are_heeded(two):
    """So that the wish above shows what it is to show."""
    wish = FEATURES["penalties"]
    without = {name: value for name, value in wish.items() if not name.endswith("penalty")}
    assert texts(complete(two, **wish)) != texts(complete(two, **without))


@pytest.mark.parametrize("kind", ["string", "token"])
def test_all_stop_where_they_stop_with_one_plan(one, two, kind):
    """The plan behind the one that draws the stop is sent already, and nobody sees its token."""
    wish = {"prompt": f"where to stop by {kind}", **FOUR}
    whole = texts(complete(one, **wish))
    at = next(at for at in range(20, 60) if whole[2][at].isascii())
    stop = whole[2][at]
    stops = {"stop": stop} if kind == "string" else {"stop_token_ids": [ord(stop)]}
    choices, *counts = told(two, {**wish, **stops})
    assert (choices, *counts) == told(one, {**wish, **stops})
    assert choices[2]["finish_reason"] == "stop"
    assert choices[2]["stop_reason"] == (stop if kind == "string" else ord(stop))


def test_a_prompt_asked_again_is_cached_and_answered_alike(one, two):
    wish = {"prompt": ids_of("again", 200), **FOUR}
    expected = told(one, wish)
    with counted(two) as grown:
        assert [told(two, wish) for _ in range(3)] == [expected] * 3
    assert grown["prefix_cache_hits_total"] == 2 * 192
    assert grown["cow_copies_total"] == 3 * 3


def test_those_that_are_swapped_answer_as_if_there_were_room(one, two):
    """6 x 4 answers of 80 tokens are 6 x 4 x 4 blocks and more, and there are 64."""
    wish = {"prompt": [ids_of(f"{number} swaps", 20) for number in range(6)], **FOUR}
    expected = told(one, wish)
    with counted(two) as grown:
        assert told(two, wish) == expected
    assert grown['preemptions_total{mode="swap"}'] > 0
    assert grown["swap_in_blocks_total"] == grown["swap_out_blocks_total"] > 0


def test_all_together_answer_as_one_by_one(one, two):
    expected = [told(one, wish) for wish in FEATURES.values()] * 2
    with counted(two) as grown, ThreadPoolExecutor(2 * len(FEATURES)) as pool:
        together = list(pool.map(lambda wish: told(two, wish), [*FEATURES.values()] * 2))
    assert together == expected
    assert grown['preemptions_total{mode="swap"}'] > 0
    assert grown["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_a_stream_goes_on_though_a_process_is_killed(one, tmp_path, name):
    """kill -9 between any two tokens; a step is long, so that plans are in flight just then."""
    stack = started(tmp_path, "--plans-in-flight", "2", "--toy-step-ms", "20", *SMALL)
    wish = {"prompt": ids_of(f"{name} killed", 40), **FOUR, "max_tokens": 150}
    try:
        before = stack.children()
        with open_stream(stack, **wish) as stream:
            chunks = [next(stream) for _ in range(40)]
            before[name].kill()
            chunks += stream
        assert chunks.pop() == "[DONE]"
        assert joined(chunks) == texts(complete(one, **wish))
        after = stack.children()
        changed = {child for child in before if before[child].pid != after[child].pid}
        assert changed == {name}
        metrics = stack.metrics()
        if name == "executor":
            assert metrics["steps_lost_total"] == 2, "both plans that were in flight"
            assert metrics["executors_adopted_total"] == 2
        else:
            assert metrics["requests_accepted_total"] == 1, "the gateway asked the new one"
            assert metrics["generation_tokens_total"] < 4 * 150, "only for what was missing"
        until(stack.is_idle, "idle")
        assert stack.unheld() == NUM_BLOCKS
    finally:
        stack.stop()


def joined(chunks):
    parts = ["", "", "", ""]
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["text"]
    return parts
