"""Plans of the real scheduler, two under way, on streams that run late: the CPU's tokens."""

import pytest

from shared.messages import PreemptionMode
from shared.sampling import NO_DRAW, DrawParams, SamplingParams
from tests.executor.beams.in_process import InProcess
from tests.executor.gpu.late_streams import LateStreams
from tests.executor.gpu.machines import BLOCK_SIZE, NUM_ASIDE, gpu, plain
from tests.kernels.decoders import Sizes

SMALL = Sizes(hidden=16, inner=16, heads=1, kv_heads=1, head_dim=16, layers=1, vocab=61)
NUM_BLOCKS = 13
WISHES = (
    SamplingParams(DrawParams(temperature=1.0, top_p=0.9), n=2, seed=5, max_tokens=9),
    SamplingParams(DrawParams(temperature=0.0), max_tokens=12, ignore_eos=True),
    SamplingParams(DrawParams(frequency_penalty=0.5), seed=6, max_tokens=8, min_tokens=8),
    SamplingParams(NO_DRAW, n=2, use_beam_search=True, max_tokens=4),
    SamplingParams(DrawParams(top_k=7), seed=7, max_tokens=10, logprobs=1),
)


def server(machine, **config):
    """It, with every answer."""
    made = InProcess(
        machine.model, NUM_BLOCKS, BLOCK_SIZE, NUM_ASIDE, machine.interpreter,
        preemption_mode="swap", max_num_batched_tokens=16, **config,
    )  # fmt: skip
    for number, wish in enumerate(WISHES):
        made.submit(str(number), tuple(range(3 + 9 * number, 10 + 9 * number)), wish)
    made.run()
    return made


def answers(made):
    return {name: answer.token_ids for name, answer in made.answers.items()}


@pytest.fixture(scope="module")
def wanted():
    return answers(server(plain(SMALL, NUM_BLOCKS)))


@pytest.mark.parametrize("seed", range(6))
def test_the_same_answers_with_swaps_and_copies(wanted, seed):
    machine = gpu((2, 4), LateStreams(seed), SMALL, NUM_BLOCKS)
    made = server(machine, plans_in_flight=2)
    assert answers(made) == wanted
    counters = made.core.counters
    assert counters.preemptions[PreemptionMode.SWAP] >= 1
    assert counters.swap_in_blocks == counters.swap_out_blocks > 0
    assert counters.cow_copies >= 1
    assert 0 < machine.runner.graphs.num_replayed < made.num_steps
