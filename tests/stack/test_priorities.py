"""Priorities, deadlines and bills through the real processes."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.stack.client import complete, open_stream, post
from tests.stack.stack import counted, start, until

pytestmark = pytest.mark.stack

PATH = "/v1/completions"
NUM_BLOCKS, BLOCK_SIZE = 64, 16
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
SHORT = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """Two seats, so that whoever comes third waits or takes one."""
    stack = start(
        tmp_path_factory.mktemp("ordered"), "--model", "toy", "--scheduling-policy", "priority",
        "--enable-kv-bill", "--max-num-seqs", "2", "--toy-step-ms", "10",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """First come, first served, from few blocks that are swapped."""
    stack = start(
        tmp_path_factory.mktemp("small"), "--model", "toy", "--enable-kv-bill",
        "--preemption-mode", "swap", "--num-gpu-blocks-override", "16", "--max-model-len", "200",
        "--toy-step-ms", "2",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(ordered):
    yield
    until(ordered.is_idle, "idle")
    assert ordered.unheld() == NUM_BLOCKS


def ids_of(name, count):
    return [*name.encode(), *[32 + (number * 7) % 90 for number in range(count - len(name))]]


def ended_at(stack, wish):
    """(when it was there, the answer)."""
    answer = complete(stack, **wish)
    return time.monotonic(), answer


def running(stack):
    return stack.metrics()["num_requests_running"]


# ------------------------------------------------------------------ priorities


def test_the_lowest_number_overtakes_who_waits_and_who_runs(ordered):
    """Two run and one waits; the urgent one comes last and is there first."""
    long = [{"prompt": f"long no. {number}", **LONG, "priority": 5} for number in range(3)]
    alone = [complete(ordered, **wish)["choices"] for wish in long]
    with counted(ordered) as grown, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ended_at, ordered, wish) for wish in long]
        until(lambda: running(ordered) == 2, "both seats are taken")
        urgent = pool.submit(ended_at, ordered, {"prompt": "now", **SHORT, "priority": -1})
        at, _ = urgent.result()
        others = [one.result() for one in asked]
    assert all(at < other_at for other_at, _ in others)
    assert [answer["choices"] for _, answer in others] == alone, "it cost them time and no token"
    given_way = sum(answer["usage"]["kv_bill"]["preemptions_swap"] for _, answer in others)
    given_way += sum(answer["usage"]["kv_bill"]["preemptions_recompute"] for _, answer in others)
    told = sum(grown[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))
    assert given_way == told > 0


def test_beams_take_their_places_by_priority_too(ordered):
    long = [{"prompt": f"runs no. {number}", **LONG, "priority": 1} for number in range(2)]
    beams = {"prompt": "beams", "use_beam_search": True, "n": 2, **SHORT, "priority": 0}
    alone = complete(ordered, **beams)["choices"]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ended_at, ordered, wish) for wish in long]
        until(lambda: running(ordered) == 2, "both seats are taken")
        at, answer = ended_at(ordered, beams)
        assert all(at < one.result()[0] for one in asked)
    assert answer["choices"] == alone


def test_without_the_policy_a_priority_is_refused_by_its_name(small):
    for stream in (True, False):
        status, _, text = post(small, PATH, {"prompt": "x", "priority": 1, "stream": stream})
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, "priority")
        assert "--scheduling-policy priority" in error["message"]
    assert complete(small, prompt="x", priority=0)["choices"]


# ------------------------------------------------------------------ deadlines


def test_a_deadline_that_passes_while_it_runs_is_408(ordered):
    wish = {"prompt": "too slow", **LONG, "deadline_s": 1}
    with counted(ordered) as grown:
        status, headers, text = post(ordered, PATH, wish)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (408, "deadline_exceeded")
    assert error["message"].startswith("deadline_s of 1 s passed after ")
    assert headers["x-should-retry"] == "false"
    assert grown["deadlines_passed_total"] == 1


def test_a_deadline_that_passes_while_it_waits_is_408(ordered):
    with ThreadPoolExecutor(2) as pool:
        long = [{"prompt": f"waits no. {number}", **LONG} for number in range(2)]
        asked = [pool.submit(complete, ordered, **wish) for wish in long]
        until(lambda: running(ordered) == 2, "both seats are taken")
        status, _, text = post(ordered, PATH, {"prompt": "x", "deadline_s": 0.5})
        assert running(ordered) == 2
        assert [one.result()["usage"]["completion_tokens"] for one in asked] == [300, 300]
    assert (status, json.loads(text)["error"]["code"]) == (408, "deadline_exceeded")
    assert "after 0 tokens" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"use_beam_search": True, "n": 2}], ids=["greedy", "beams"])
def test_a_stream_that_has_begun_ends_with_an_error_event(ordered, more):
    wish = {"prompt": f"streams {len(more)}", **LONG, **more, "deadline_s": 1.5}
    with open_stream(ordered, **wish) as stream:
        *chunks, event, end = stream
    assert end == "[DONE]"
    assert event["error"]["code"] == "deadline_exceeded"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert bool(choices) == (not more), "beams tell nothing before their end"
    assert not any(choice["finish_reason"] for choice in choices), "never as if it were whole"


def test_the_official_client_gets_a_typed_error_once(ordered):
    with openai.OpenAI(base_url=ordered.url + "/v1", api_key="none", max_retries=2) as client:
        with counted(ordered) as grown, pytest.raises(openai.APIStatusError) as late:
            client.completions.create(
                model="toy", prompt="late", max_tokens=300,
                extra_body={"deadline_s": 0.5, "priority": 3, "ignore_eos": True},
            )  # fmt: skip
        assert (late.value.status_code, late.value.code) == (408, "deadline_exceeded")
        assert grown["deadlines_passed_total"] == 1, "asked once"
        answer = client.completions.create(
            model="toy", prompt="in time", extra_body={"deadline_s": 60, "priority": 3}
        )
        assert answer.usage.kv_bill["peak_blocks"] == 2


def test_a_deadline_strikes_though_the_executor_is_dead(tmp_path):
    """While the next one starts, nothing is computed; the deadline is before that."""
    stack = start(tmp_path, "--model", "toy", "--toy-step-ms", "20", "--max-model-len", "512")
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, stack, PATH, {"prompt": "x", **LONG, "deadline_s": 2})
            until(lambda: running(stack) == 1, "it runs")
            stack.children()["executor"].kill()
            status, _, text = asked.result()
        assert (status, json.loads(text)["error"]["code"]) == (408, "deadline_exceeded")
        until(lambda: stack.metrics()["executor_up"] == 1, "the next executor")
        assert complete(stack, prompt="x", deadline_s=60)["choices"]
    finally:
        stack.stop()


# ------------------------------------------------------------------ bills


def bill(stack, **wish):
    return complete(stack, **wish)["usage"]["kv_bill"]


def test_a_bill_counts_blocks(small):
    """20 tokens and 12 more are 2 blocks: the last one drawn has no place."""
    wish = {"prompt": ids_of("one", 20), "ignore_eos": True, "temperature": 0}
    assert bill(small, **wish, max_tokens=12) == {
        "peak_blocks": 2, "peak_saved_blocks": 0, "sharing_saved": 0.0, "copied_blocks": 0,
        "preemptions_swap": 0, "preemptions_recompute": 0, "swapped_bytes": 0,
    }  # fmt: skip


def test_what_four_answers_share_is_told(small):
    """Figure 8: 24 tokens are a full block and a half; three of four copy the half one."""
    wish = {"prompt": ids_of("four", 24), "n": 4, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    told = bill(small, **wish)
    assert (told["peak_blocks"], told["copied_blocks"]) == (1 + 4, 3)
    assert told["peak_saved_blocks"] >= 3
    assert 0 < told["sharing_saved"] < 1


def test_what_beams_share_is_told_in_streams_too(small):
    beams = {"prompt": ids_of("beams", 24), "use_beam_search": True, "n": 4, "max_tokens": 30}
    wish = {**beams, "ignore_eos": True}
    told = bill(small, **wish)
    assert told["sharing_saved"] > 0.3
    assert told["copied_blocks"] >= 3
    with open_stream(small, **wish, stream_options={"include_usage": True}) as stream:
        *_, last, _ = stream
    assert last["usage"]["kv_bill"]["copied_blocks"] == told["copied_blocks"]


def test_who_gives_way_is_billed_for_it(small):
    prompts = [ids_of(f"{number} of three", 20) for number in range(3)]
    wish = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with counted(small) as grown:
        told = bill(small, prompt=prompts, **wish)
        until(small.is_idle, "idle")
    assert told["preemptions_swap"] == grown['preemptions_total{mode="swap"}'] > 0
    moved = grown["swap_out_blocks_total"] + grown["swap_in_blocks_total"]
    assert moved > 0
    assert told["swapped_bytes"] > 0
    assert told["swapped_bytes"] % moved == 0, "so many bytes a block"
    assert told["peak_blocks"] == 8, "119 tokens of the longest"
