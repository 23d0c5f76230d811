"""What happens in the real processes when blocks run out, on the GPU's side or on the CPU's."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.client import complete
from tests.stack.stack import counted, start, until

pytestmark = pytest.mark.stack


@pytest.fixture
def started(tmp_path):
    """Starts a toy stack with the flags given, and ends it."""
    stacks = []

    def begin(*flags):
        stacks.append(start(tmp_path, "--model", "toy", "--toy-step-ms", "2", *flags))
        return stacks[-1]

    yield begin
    for stack in stacks:
        stack.stop()


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def test_when_the_swap_space_is_full_they_are_computed_again(started):
    """R1."""
    stack = started(
        "--num-gpu-blocks-override", "64", "--num-cpu-blocks-override", "2",
        "--preemption-mode", "swap",
    )  # fmt: skip

    def asked(number):
        return complete(
            stack, prompt=f"{number:02} of twenty", n=8, seed=number, max_tokens=64,
            temperature=1, ignore_eos=True,
        )  # fmt: skip

    with counted(stack) as grown:
        with ThreadPoolExecutor(20) as pool:
            together = list(pool.map(asked, range(20)))
        until(stack.is_idle, "idle")
    assert grown['preemptions_total{mode="recompute"}'] > 0
    assert grown["swap_fallbacks_total"] > 0
    assert grown["requests_cancelled_total"] == 0
    assert [len(set(texts(answer))) for answer in together] == [8] * 20
    assert {answer["usage"]["completion_tokens"] for answer in together} == {8 * 64}
    assert stack.unheld() == 64
    assert stack.metrics()["cpu_cache_usage_perc"] == 0
    with counted(stack) as grown:
        assert [texts(asked(number)) for number in range(20)] == [*map(texts, together)]
    assert preemptions(grown) == 0, "a request alone has room for all eight"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_two_that_do_not_fit_together_answer_as_if_alone(started, mode):
    """R2: 34 + 35 tokens are 5 blocks, and there are 7."""
    stack = started("--num-gpu-blocks-override", "7", "--preemption-mode", mode)
    prompts = [[first, *range(40, 73)] for first in (10, 11)]
    wish = {"max_tokens": 35, "ignore_eos": True, "temperature": 0}
    with counted(stack) as grown:
        both = complete(stack, prompt=prompts, **wish)
        until(stack.is_idle, "idle")
    assert grown[f'preemptions_total{{mode="{mode}"}}'] >= 1
    assert preemptions(grown) == grown[f'preemptions_total{{mode="{mode}"}}']
    assert grown["swap_in_blocks_total"] == grown["swap_out_blocks_total"]
    assert (grown["swap_out_blocks_total"] > 0) == (mode == "swap")
    assert stack.unheld() == 7
    assert stack.metrics()["cpu_cache_usage_perc"] == 0
    alone = [texts(complete(stack, prompt=prompt, **wish))[0] for prompt in prompts]
    assert texts(both) == alone
    assert both["usage"]["completion_tokens"] == 2 * 35


def preemptions(metrics):
    return sum(metrics[f'preemptions_total{{mode="{mode}"}}'] for mode in ("swap", "recompute"))
