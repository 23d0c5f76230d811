"""Beam search through the real processes: what is answered is what one alone with room gets.

The roomy stack runs one plan at a time and has blocks for everybody; the narrow ones run two, and
somebody always has to give way.
"""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.stack.client import complete, open_stream
from tests.stack.stack import counted, start, until

pytestmark = pytest.mark.stack

NUM_BLOCKS = 64
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512")
FULL_LENGTH = {"max_tokens": 48, "ignore_eos": True}


def started(folder, *flags):
    return start(folder, "--model", "toy", *flags)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    stack = started(
        tmp_path_factory.mktemp("roomy"), "--num-gpu-blocks-override", "2048",
        "--max-model-len", "512",
    )  # fmt: skip
    yield stack
    assert preemptions(stack.metrics()) == 0
    stack.stop()


@pytest.fixture(scope="module", params=["swap", "recompute"])
def narrow(request, tmp_path_factory):
    stack = started(
        tmp_path_factory.mktemp(request.param), "--preemption-mode", request.param,
        "--plans-in-flight", "2", "--toy-step-ms", "2", *SMALL,
    )  # fmt: skip
    stack.mode = request.param
    yield stack
    stack.stop()


def preemptions(metrics):
    return sum(metrics[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))


def ids_of(name, count):
    return [*name.encode(), *[32 + (number * 7) % 90 for number in range(count - len(name))]]


def beams(name, width, **more):
    return {"prompt": ids_of(name, 21), "use_beam_search": True, "n": width, **FULL_LENGTH, **more}


def told(stack, wish):
    """What a client is told, but for what was cached: choices and the counts of tokens."""
    answer = complete(stack, **wish)
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


WIDTHS = {f"width {width}": beams(f"{width} beams", width) for width in (1, 2, 4, 6)}
WISHES = WIDTHS | {
    "to the end of text": {**beams("ends", 4, max_tokens=200), "ignore_eos": False},
    "the shortest": beams("short", 3, length_penalty=-2.0, ignore_eos=False),
    "no shorter": beams("enough", 3, length_penalty=-2.0, ignore_eos=False, min_tokens=20),
    "early": beams("early", 4, early_stopping=True, ignore_eos=False),
    "never": beams("never", 4, early_stopping="never", ignore_eos=False, length_penalty=0.5),
    "stop tokens": beams("stops", 4, stop_token_ids=[*range(64)], return_token_ids=True),
    "logprobs": beams("likely", 4, logprobs=3, echo=True),
    "a list": {**beams("", 3), "prompt": [ids_of(f"{number}. of a list", 20) for number in "ab"]},
}


# ------------------------------------------------------------------ alone


@pytest.mark.parametrize("name", WISHES)
def test_a_stream_tells_what_a_whole_answer_tells(roomy, name):
    """R12."""
    wish = WISHES[name]
    answer = complete(roomy, **wish)
    streamed = {**wish, "stream_options": {"include_usage": True}}
    with open_stream(roomy, **streamed) as stream:
        *chunks, last, end = stream
    assert end == "[DONE]"
    assert joined(chunks) == {
        choice["index"]: (choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    }
    assert len(answer["choices"]) == wish["n"] * (2 if name == "a list" else 1)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][count] for count in counts] == [answer["usage"][c] for c in counts]


def joined(chunks):
    """{index: (text, finish reason)} of a stream."""
    found = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            text, reason = found.get(choice["index"], ("", None))
            assert reason is None, "nothing comes after a choice's end"
            found[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return found


def test_choices_come_best_first_and_are_all_different(roomy):
    wish = {**WIDTHS["width 6"], "logprobs": 0}
    choices = complete(roomy, **wish)["choices"]
    scores = [sum(choice["logprobs"]["token_logprobs"]) / 48 for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["text"] for choice in choices}) == 6


def test_a_width_of_one_is_the_greedy_answer(roomy):
    greedy = {"prompt": WIDTHS["width 1"]["prompt"], "temperature": 0, **FULL_LENGTH}
    assert texts(complete(roomy, **WIDTHS["width 1"])) == texts(complete(roomy, **greedy))


def test_the_best_beam_is_no_worse_than_the_greedy_answer(roomy):
    def score(wish):
        answer = complete(roomy, **wish, logprobs=0)
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"])

    greedy = {"prompt": WIDTHS["width 6"]["prompt"], "temperature": 0, **FULL_LENGTH}
    assert score(WIDTHS["width 6"]) > score(greedy)


def test_stop_tokens_end_beams_and_are_named(roomy):
    choices = complete(roomy, **WISHES["stop tokens"])["choices"]
    stopped = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        assert choice["token_ids"][-1] == choice["stop_reason"] < 64
        assert not any(token_id < 64 for token_id in choice["token_ids"][:-1])


def test_the_official_client_asks_by_extra_body(roomy):
    wish = {"messages": [{"role": "user", "content": "Hi"}], "model": "toy", "max_tokens": 20}
    body = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    with openai.OpenAI(base_url=roomy.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(**wish, n=3, extra_body=body)
        assert len({choice.message.content for choice in answer.choices}) == 3
        found = ["", "", ""]
        for chunk in client.chat.completions.create(**wish, n=3, extra_body=body, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        assert found == [choice.message.content for choice in answer.choices]
        for wrong, param in (({"temperature": 0.5}, "temperature"), ({"stop": "x"}, "stop")):
            with pytest.raises(openai.BadRequestError) as refusal:
                client.chat.completions.create(**wish, **wrong, extra_body=body)
            assert refusal.value.param == param


# ------------------------------------------------------------------ with others


OTHERS = [
    {"prompt": ids_of("greedy", 30), "temperature": 0, **FULL_LENGTH},
    {"prompt": ids_of("sampled", 30), "n": 4, "seed": 7, "temperature": 1, **FULL_LENGTH},
    {"prompt": "penalised", "seed": 3, "presence_penalty": 1.5, **FULL_LENGTH},
    {"prompt": "until it ends", "seed": 5, "max_tokens": 400},
]


def test_all_together_answer_as_one_by_one_though_some_give_way(roomy, narrow):
    """Beams of all widths, sampled and greedy ones, in the same batches and two plans in flight."""
    wishes = [*WISHES.values(), *OTHERS]
    expected = [told(roomy, wish) for wish in wishes] * 2
    with counted(narrow) as grown, ThreadPoolExecutor(2 * len(wishes)) as pool:
        together = list(pool.map(lambda wish: told(narrow, wish), wishes * 2))
    assert together == expected
    assert grown[f'preemptions_total{{mode="{narrow.mode}"}}'] > 0
    assert grown["cow_copies_total"] > 0
    until(narrow.is_idle, "idle")
    assert narrow.unheld() == NUM_BLOCKS
    assert narrow.metrics()["cpu_cache_usage_perc"] == 0


def test_beams_alone_give_way_to_one_another_and_answer_alike(roomy, narrow):
    """Nobody else is there, so it is beams that are moved or computed again.

    Each may need 41 blocks, so that two at once are enough, however slowly clients come.
    """
    wishes = [beams(f"{number} of eight", 4, max_tokens=150) for number in range(8)]
    expected = [told(roomy, wish) for wish in wishes]
    with counted(narrow) as grown, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda wish: told(narrow, wish), wishes))
    assert together == expected
    assert grown[f'preemptions_total{{mode="{narrow.mode}"}}'] > 0
    assert (grown["swap_in_blocks_total"] > 0) == (narrow.mode == "swap")
    until(narrow.is_idle, "idle")
    assert narrow.unheld() == NUM_BLOCKS


def test_three_hundred_cut_streams_leave_nothing(narrow):
    """R22, with beams: of every three, one searches, one has four answers, one has one.

    A search tells nothing before its end, so its client leaves at the first sign of life.
    """

    def cut(number):
        wish = {"prompt": f"cut no. {number:03}...", "max_tokens": 200, "ignore_eos": True}
        if number % 3 == 0:
            wish |= {"use_beam_search": True, "n": 4}
        elif number % 3 == 1:
            wish |= {"n": 4}
        with open_stream(narrow, **wish) as stream:
            for _ in range(0 if number % 3 == 0 else 3 * wish.get("n", 1)):
                assert next(stream)["choices"]

    with counted(narrow) as grown:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(cut, range(300)))
        until(narrow.is_idle, "idle")
    assert narrow.unheld() == NUM_BLOCKS
    assert narrow.metrics()["cpu_cache_usage_perc"] == 0
    assert grown["requests_cancelled_total"] == 300
    assert grown[f'preemptions_total{{mode="{narrow.mode}"}}'] > 0


# ------------------------------------------------------------------ losses


@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_a_search_ends_alike_though_a_process_is_killed(roomy, tmp_path, name):
    """kill -9 in its middle, when 40 of its 100 tokens are there."""
    stack = started(tmp_path, "--plans-in-flight", "2", "--toy-step-ms", "20", *SMALL)
    wish = beams(f"{name} killed", 4, max_tokens=100)
    try:
        before = stack.children()
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(told, stack, wish)
            streamed = pool.submit(events_of, stack, wish)
            until(lambda: stack.metrics()["computed_tokens_total"] > 2 * 4 * 40, "in its middle")
            before[name].kill()
            assert whole.result() == told(roomy, wish)
            assert joined(streamed.result()) == {
                index: (choice["text"], choice["finish_reason"])
                for index, choice in enumerate(whole.result()[0])
            }
        after = stack.children()
        assert {c for c in before if before[c].pid != after[c].pid} == {name}
        metrics = stack.metrics()
        if name == "executor":
            assert metrics["steps_lost_total"] > 0
            assert metrics["executors_adopted_total"] == 2
        else:
            assert metrics["requests_accepted_total"] == 2, "the gateway asked the new one"
        until(stack.is_idle, "idle")
        assert stack.unheld() == NUM_BLOCKS
    finally:
        stack.stop()


def events_of(stack, wish):
    with open_stream(stack, **wish) as stream:
        *chunks, end = stream
    assert end == "[DONE]"
    return chunks
