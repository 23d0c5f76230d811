"""The real processes over a GPU's kernels, in Triton's interpreter: the CPU executor's tokens."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.executor.beams.models import CONFIG, write_random
from tests.stack.client import complete
from tests.stack.stack import counted, start, until

pytestmark = [pytest.mark.stack, pytest.mark.triton]

NUM_BLOCKS = 7
TOO_MANY = [[first, *range(40, 73)] for first in (10, 11)]
"""Prompts of 34 ids: with 35 tokens more each has 5 blocks."""
SAMPLED = {"seed": 11, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
PENALISED = {"seed": 3, "temperature": 0.7, "frequency_penalty": 0.8}


def write_model(folder):
    """Two layers of random weights, and a tokenizer with a letter for each of its ids."""
    write_random(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: CONFIG["vocab_size"]]
    core = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def answers(folder, model, *flags):
    """The texts of a few calls, and what the scheduler counted meanwhile."""
    stack = start(
        folder, "--model", str(model), "--dtype", "float32", "--preemption-mode", "swap",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "96", *flags,
    )  # fmt: skip
    try:
        with counted(stack) as grown:
            answers = [
                complete(stack, prompt=[*range(20, 42)], max_tokens=12, n=2, **SAMPLED),
                complete(stack, prompt=TOO_MANY, max_tokens=35, temperature=0, ignore_eos=True),
                complete(stack, prompt=[7, 8, 9], max_tokens=10, **PENALISED),
                complete(stack, prompt=[50, 51, 52], max_tokens=6, temperature=0, logprobs=2),
            ]
            until(stack.is_idle, "idle")
        texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
        return texts, grown, stack.log.read_text()
    finally:
        stack.stop()


def test_the_same_tokens_as_the_cpu(tmp_path_factory, model):
    """With a copy of a shared block, a swap, and two plans in flight."""
    gpu, grown, log = answers(
        tmp_path_factory.mktemp("gpu"), model,
        "--device", "interpreter", "--plans-in-flight", "2",
    )  # fmt: skip
    cpu, _, _ = answers(tmp_path_factory.mktemp("cpu"), model, "--device", "cpu")
    assert gpu == cpu
    assert len(set(gpu[0])) == 2
    assert "device=interpreter" in log
    assert grown["cow_copies_total"] >= 1
    assert grown['preemptions_total{mode="swap"}'] >= 1
    assert grown["swap_out_blocks_total"] == grown["swap_in_blocks_total"] > 0
