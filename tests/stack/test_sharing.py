"""Shared blocks and the prefix cache, seen from outside: the API, and the scheduler's counters."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import open_stream, post
from tests.stack.stack import counted, start, until

pytestmark = pytest.mark.stack

NUM_BLOCKS, BLOCK_SIZE = 256, 16
KEYS = ("sk-one", "sk-two")
GREEDY = {"temperature": 0, "ignore_eos": True}
FOUR = {"n": 4, "seed": 7, "temperature": 1, "ignore_eos": True}


def started(folder, *flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITFLAP_API_KEY", ",".join(KEYS))
        return start(folder, "--model", "toy", *flags)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    stack = started(
        tmp_path_factory.mktemp("sharing"), "--num-gpu-blocks-override", str(NUM_BLOCKS),
        "--max-model-len", "2048", "--toy-step-ms", "2",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(toy):
    """After every test nobody holds a block, and none is lost."""
    yield
    until(toy.is_idle, "idle")
    assert toy.unheld() == NUM_BLOCKS


def headers_of(key):
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def asked(stack, path="/v1/completions", key=KEYS[0], **wish):
    status, _, text = post(stack, path, wish, headers_of(key))
    assert status == 200, text
    return json.loads(text)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def ids_of(name, count):
    """A prompt of `count` ids that no other test has; its first block is its own."""
    return [*name.encode(), *[32 + (number * 7) % 90 for number in range(count - len(name))]]


# ------------------------------------------------------------------ n


def test_four_streamed_answers_share_their_prompt(toy):
    """R13. A prompt of 33 ids is two full blocks that all four keep, and one that three copy."""
    wish = {"prompt": ids_of("R13", 33), "max_tokens": 100, **FOUR}

    def told():
        with open_stream(toy, headers_of(KEYS[0]), **wish) as stream:
            chunks = [next(stream) for _ in range(8)]
            blocks = toy.blocks()
            chunks += stream
        return chunks, blocks

    with counted(toy) as grown:
        (first, blocks), (again, _) = told(), told()
    assert blocks["shared"] == 2
    assert blocks["used"] <= 2 + 4 * 7, "133 places are 9 blocks, of which 7 are a sequence's own"
    assert grown["cow_copies_total"] == 2 * 3
    for chunks in (first, again):
        assert chunks.pop() == "[DONE]"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ends = [choice["index"] for choice in choices if choice["finish_reason"] == "length"]
        assert sorted(ends) == [0, 1, 2, 3]
        assert {choice["index"] for choice in choices} == {0, 1, 2, 3}
    assert joined(first) == joined(again)
    assert len(set(joined(first))) == 4


def joined(chunks):
    parts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["text"]
    return parts


def test_four_answers_are_the_same_alone_and_in_company(toy):
    wish = {"prompt": "in any company", "max_tokens": 250, **FOUR}
    alone = texts(asked(toy, **wish))
    assert len(set(alone)) == 4

    def other(number):
        wish = {"max_tokens": 300, "ignore_eos": True}
        return asked(toy, prompt=f"{number} others", **wish, n=1 + number % 3)

    with counted(toy) as grown, ThreadPoolExecutor(16) as pool:
        others = [pool.submit(other, number) for number in range(12)]
        together = [pool.submit(asked, toy, **wish) for _ in range(4)]
        assert [texts(one.result()) for one in together] == [alone] * 4
        for one in others:
            one.result()
    # 16 x 17 of ours and 24 x 20 of the others are more than 256 blocks: some gave way.
    assert grown['preemptions_total{mode="swap"}'] + grown['preemptions_total{mode="recompute"}']


def test_the_best_of_four_is_the_likeliest(toy):
    wish = {"prompt": "the best", "max_tokens": 20, **FOUR}
    four = asked(toy, **wish, logprobs=0)
    best = asked(toy, **{**wish, "n": 1}, best_of=4)

    def mean(choice):
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    assert texts(best) == [max(four["choices"], key=mean)["text"]]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == four["usage"]["completion_tokens"] == 80


def test_one_answers_stop_string_leaves_the_others(toy):
    wish = {"prompt": "where to stop", "max_tokens": 60, **FOUR}
    whole = texts(asked(toy, **wish))
    stop = whole[2][20:23]
    expected = [text.split(stop)[0] for text in whole]
    answer = asked(toy, **wish, stop=stop)
    assert texts(answer) == expected
    assert answer["choices"][2]["stop_reason"] == stop


# ------------------------------------------------------------------ the cache


def test_a_prompt_asked_again_is_cached_up_to_its_last_token(toy):
    """R15."""
    prompt = ids_of("R15", 1464)
    with counted(toy) as grown:
        answers = [asked(toy, prompt=prompt, max_tokens=8, **GREEDY) for _ in range(4)]
    assert [cached(answer) for answer in answers] == [0, 1456, 1456, 1456]
    assert len({text for answer in answers for text in texts(answer)}) == 1
    assert grown["prefix_cache_queries_total"] == 4 * 1464
    assert grown["prefix_cache_hits_total"] == 3 * 1456
    assert grown["computed_tokens_total"] == 1464 + 3 * 8 + 4 * 7


def test_a_shared_system_prompt_is_computed_once(toy):
    """Workload B: they come all at once, and who comes second waits for the first one's blocks."""
    system = {"role": "system", "content": "You are terse, exact and kind. " * 20}

    def chat(number):
        user = {"role": "user", "content": f"Question {number}: why?"}
        return asked(
            toy, "/v1/chat/completions", messages=[system, user], max_tokens=4, **GREEDY
        )  # fmt: skip

    with counted(toy) as grown, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(chat, range(24)))
    hits = sorted(cached(answer) for answer in answers)
    assert hits[0] == 0
    assert hits[1] >= 38 * BLOCK_SIZE, "all but one found its 620 characters"
    assert grown["prefix_cache_hits_total"] == sum(hits)
    assert [chat(number)["choices"] for number in range(3)] == [
        answer["choices"] for answer in answers[:3]
    ]


def test_nobody_hits_the_blocks_of_another_salt_or_key(toy):
    wish = {"prompt": ids_of("salted", 100), "max_tokens": 4, **GREEDY}
    askers = [
        {"key": key, **salt}
        for key in KEYS
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    with counted(toy) as grown:
        first = [asked(toy, **asker, **wish) for asker in askers]
        again = [asked(toy, **asker, **wish) for asker in askers]
    assert [cached(answer) for answer in first] == [0] * 6
    assert [cached(answer) for answer in again] == [96] * 6
    assert grown["prefix_cache_hits_total"] == 6 * 96
    assert len({text for answer in first + again for text in texts(answer)}) == 1


def test_a_stop_string_does_not_hide_what_was_cached(toy):
    wish = {"prompt": ids_of("stopped", 50), "max_tokens": 40, **GREEDY}
    (text,) = texts(asked(toy, **wish))
    stopped = asked(toy, **wish, stop=text[10:14])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert cached(stopped) == 48
    with open_stream(
        toy, headers_of(KEYS[0]), **wish, stop=text[10:14], stream_options={"include_usage": True}
    ) as told:
        *_, last, end = told
    assert end == "[DONE]"
    assert last["usage"] == stopped["usage"]


# ------------------------------------------------------------------ cut streams


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_three_hundred_cut_streams_leave_nothing(tmp_path, mode):
    """R22: some of them have four answers, and some had given way when they were cut."""
    stack = started(
        tmp_path, "--num-gpu-blocks-override", "64", "--max-model-len", "512",
        "--preemption-mode", mode, "--toy-step-ms", "1",
    )  # fmt: skip

    def cut(number):
        n = 4 if number % 2 else 1
        wish = {"prompt": f"cut no. {number:03}...", "max_tokens": 200, "ignore_eos": True}
        with open_stream(stack, headers_of(KEYS[0]), **wish, n=n) as stream:
            for _ in range(3 * n):
                assert next(stream)["choices"]

    try:
        with counted(stack) as grown:
            with ThreadPoolExecutor(32) as pool:
                list(pool.map(cut, range(300)))
            until(stack.is_idle, "idle")
        assert stack.unheld() == 64
        assert stack.metrics()["cpu_cache_usage_perc"] == 0
        assert grown["requests_cancelled_total"] == 300
        assert grown[f'preemptions_total{{mode="{mode}"}}'] > 0
        assert grown["cow_copies_total"] > 0
    finally:
        stack.stop()
