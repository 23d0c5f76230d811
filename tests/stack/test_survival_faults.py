"""Executors with a fault, and processes that are replaced one after the other, under load.

Processes run one by one here, and each is started again when it ends. What streams tell is
compared, to the token, with what they tell undisturbed.
"""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import complete, post
from tests.stack.crew import crew
from tests.stack.faulty_executor import POISON
from tests.stack.stack import until
from tests.stack.travelling import WISHES, Load, calm_answers, wishes

pytestmark = pytest.mark.stack

NUM_BLOCKS = 64
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512")
FAULTY = "tests.stack.faulty_executor"


def nothing_is_left(one, num_blocks):
    until(one.is_idle, "idle")
    assert one.unheld() == num_blocks
    assert one.metrics()["cpu_cache_usage_perc"] == 0


@pytest.mark.parametrize("which", ["in-swap-out", "in-swap-in"])
def test_the_executor_dies_in_the_middle_of_a_swap(tmp_path, which):
    """Half of the moves of a plan are done; 6 x 4 answers need more blocks than there are."""
    swapping = {
        "executor": (*SMALL, "--toy-step-ms", "2"),
        "scheduler": ("--preemption-mode", "swap"),
    }
    wish = {"n": 4, "seed": 7, "max_tokens": 60, "ignore_eos": True, "presence_penalty": 0.5}
    prompts = [[*f"{number} swaps ".encode(), *range(40, 52)] for number in range(6)]
    executor = (FAULTY, which, str(tmp_path))

    def asked(prompt):
        choices = complete(one, prompt=prompt, **wish)["choices"]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    with crew(tmp_path, executor=executor, flags=swapping) as one:
        calm = [asked(prompt) for prompt in prompts]
        assert one.metrics()["swap_out_blocks_total"] == 0
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(asked, prompts)) == calm
        assert (tmp_path / f"struck-{which}").exists()
        assert one.ends["executor"] == [-signal.SIGKILL]
        told = one.metrics()
        assert told["executor_restarts_total"] == 1
        assert told["steps_lost_total"] >= 1
        assert told["swap_out_blocks_total"] > 0
        nothing_is_left(one, NUM_BLOCKS)


def test_a_poisoned_request_dies_alone(tmp_path):
    """Whoever computes it dies. At the third executor it ends; those beside it lose nothing."""
    asked = {name: WISHES[name] for name in ("greedy", "several answers", "a chat", "beams")}
    poison = {"prompt": [*b"poison", *POISON], "max_tokens": 4, "ignore_eos": True}
    flags = {"executor": ("--toy-step-ms", "20")}
    with crew(tmp_path, executor=(FAULTY, "poison", str(tmp_path)), flags=flags) as one:
        calm = calm_answers(one, asked)
        load = Load(one.doors, asked)
        until(load.are_all_under_way, "all are told something")
        status, _, text = post(one, "/v1/completions", poison)
        assert load.results() == calm
        assert status == 500
        assert '"code": "internal_error"' in text
        assert "the executor was lost 3 times in a row at this request" in text
        assert one.ends["executor"] == [-signal.SIGKILL] * 3
        metrics = one.metrics()
        assert metrics["executor_restarts_total"] == 3
        assert metrics["steps_lost_total"] >= 3
        assert metrics['request_success_total{finished_reason="error"}'] == 1
        assert calm_answers(one, asked) == calm, "all is well without it"
        until(one.is_idle, "idle")


def test_everything_is_replaced_one_after_the_other_and_no_stream_lacks_a_token(tmp_path):
    """A rolling restart: SIGTERM to each, while streams of every kind run and clients go on."""
    flags = {
        "gateway": ("--shutdown-timeout", "0.5"),
        "executor": ("--toy-step-ms", "15", "--num-gpu-blocks-override", "1000"),
    }
    parts = ["gateway-0", "gateway-1", "scheduler", "executor"]
    with crew(tmp_path, gateways=2, flags=flags) as one:
        asked = wishes(one)
        calm = calm_answers(one, asked)
        before = one.pids()
        for name in parts:
            load = Load(one.doors, asked)
            until(load.are_all_under_way, "all are told something")
            assert one.metrics()["num_requests_running"] >= len(asked), "it meets work under way"
            assert one.restart(name, signal.SIGTERM) == 0
            assert load.results() == calm, name
            connections = max(len(one.readers) for one in load.travellers)
            assert connections == (2 if name.startswith("gateway") else 1), name
            until(one.are_all_ready, "ready again")
        assert not set(before.values()) & set(one.pids().values())
        assert {name: ends for name, ends in one.ends.items() if ends} == {
            name: [0] for name in parts
        }
        until(one.is_idle, "idle")
        assert one.metrics()["detached_streams"] == 0
