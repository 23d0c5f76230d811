"""The same plans on the CPU and as a GPU runs them: the same tokens, eagerly and by graphs."""

import pytest

from shared.messages import PREVIOUS, Move
from shared.sampling import DrawParams
from tests.executor.gpu.machines import gpu, plain
from tests.executor.plans import plan, row, sample

RANDOM = DrawParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01)
PENALISED = DrawParams(temperature=0.7, frequency_penalty=0.5)


def story():
    """Two sequences from prompts; a fork and a copy, a swap there and back, many ways to draw."""
    prompt = tuple(range(3, 14))
    return [
        plan(
            row(prompt, 0, (2, 5, 7), 1, [sample(1), sample(3, RANDOM, seed=9, index=1)]),
            row(
                (40, 41, 42), 0, (9,), 2, [sample(2, PENALISED, history=(40, 41, 42), num_prompt=3)]
            ),
            step_id=1,
        ),
        plan(
            row((PREVIOUS,), 11, (2, 5, 7), 1),
            row((33,), 11, (2, 5, 8), 3, [sample(3, RANDOM, seed=9, index=1)]),
            row((PREVIOUS,), 3, (9,), 2, [sample(2, num_top=3)]),
            step_id=2,
            copies=(Move(7, 8),),
        ),
        plan(
            row((PREVIOUS,), 12, (2, 5, 7, 11), 1),
            row((PREVIOUS,), 4, (9, 10), 2),
            step_id=3,
            swap_out=(Move(8, 0),),
        ),
        plan(
            row((PREVIOUS,), 13, (2, 5, 7, 11), 1),
            row((50,), 12, (2, 5, 12, 13), 3, [sample(3, RANDOM, seed=9, index=1)]),
            step_id=4,
            swap_in=(Move(0, 12),),
        ),
        plan(
            row((PREVIOUS,), 13, (2, 5, 12, 13), 3, [sample(3, RANDOM, seed=9, index=1)]),
            row((PREVIOUS,), 14, (2, 5, 7, 11), 1),
            step_id=5,
        ),
    ]


def told(results):
    return [(result.sampled, result.scored, result.row_errors) for result in results]


def tokens(results):
    return [[(one.sequence_id, one.token_id) for one in result.sampled] for result in results]


@pytest.mark.parametrize("graph_rows", [(), (4,)], ids=["eager", "graphs"])
def test_the_same_tokens_as_on_the_cpu(graph_rows):
    machine = gpu(graph_rows)
    assert tokens(machine.run(*story())) == tokens(plain().run(*story()))
    assert machine.runner.graphs.num_replayed == (4 if graph_rows else 0)
