"""The same plans on the CPU and as a GPU runs them: the same tokens, eagerly and by graphs."""

import pytest
import torch

from services.executor.gpu import streams as streams_module
from services.executor.gpu.parcel import Parcel
from shared.messages import PREVIOUS, Move, Score
from shared.sampling import DrawParams
from tests.executor.gpu.machines import gpu, plain
from tests.executor.plans import plan, report, row, sample

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


def test_more_draws_than_a_graph_has_room_for_are_an_eager_step():
    """100 answers of one prompt, whose last token is a step of its own: one row, 100 draws."""
    warm = DrawParams(temperature=0.9)
    plans = [
        plan(row((5, 6, 7), 0, (1,), 1, ()), step_id=1),
        plan(
            row((8,), 3, (1,), 1, [sample(i, warm, seed=i, index=i) for i in range(100)]),
            step_id=2,
        ),
        plan(row((9,), 3, (1,), 1, [sample(1, warm, seed=1)]), step_id=3),
    ]
    machine = gpu((4,))
    assert tokens(machine.run(*plans)) == tokens(plain().run(*plans))
    assert machine.runner.graphs.num_replayed == 1


def test_rows_whose_logits_are_not_finite_fail_alone_and_what_goes_on_from_them():
    """Sequence 3 attends to a block that nobody wrote, which is NaN."""
    plans = [
        plan(row((5, 6), 0, (1,), 1), row((7,), 4, (20, 21), 3), step_id=1),
        plan(
            row((PREVIOUS,), 2, (1,), 1),
            row(
                (PREVIOUS,),
                5,
                (20, 21),
                3,
                [sample(3, PENALISED, history=(*[7] * 5, PREVIOUS), num_prompt=5)],
            ),
            step_id=2,
        ),
        plan(row((PREVIOUS,), 3, (1,), 1), row((PREVIOUS,), 6, (20, 21), 3), step_id=3),
    ]
    results = told(gpu((2,)).run(*plans))
    assert results == told(plain().run(*plans))
    assert [[error.sequence_id for error in errors] for _, _, errors in results] == [[3]] * 3


def test_scores_beams_and_log_probabilities_are_the_cpus():
    plans = [
        plan(
            row((5, 6, 7, 8), 0, (1,), 1, [sample(1, num_top=2)], score=Score(0, (6, 7, 8), 1)),
            row((9, 10), 0, (2,), 2, [report(2, num_top=4)]),
            row((11, 12), 0, (3,), 3, ()),
            row((13,), 0, (4,), 4),
            step_id=1,
        ),
        plan(
            row((PREVIOUS,), 4, (1, 5), 1),
            row((40,), 2, (2,), 2, [report(2, num_top=4)]),
            row((14,), 2, (3,), 3),
            row((PREVIOUS,), 1, (4,), 4, ()),
            step_id=2,
        ),
    ]
    ours, theirs = gpu((4,)).run(*plans), plain().run(*plans)
    assert tokens(ours) == tokens(theirs)
    for made, wanted in zip(ours, theirs, strict=True):
        assert len(made.scored) == len(wanted.scored)
        for one, other in zip(made.sampled, wanted.sampled, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None:
                assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)


def test_a_long_sequence_is_in_splits_and_the_same_by_graphs():
    """300 tokens are two splits, which the smallest graphs have no room for."""
    prompt = tuple(3 + i % 50 for i in range(299))
    table = tuple(range(76))
    plans = [
        plan(row(prompt, 0, table, 1), step_id=1),
        plan(row((PREVIOUS,), 299, table, 1), step_id=2),
        plan(row((PREVIOUS,), 300, table, 1), step_id=3),
    ]
    by_graph, eager = gpu((1, 2), num_blocks=80), gpu(num_blocks=80)
    assert tokens(by_graph.run(*plans)) == tokens(eager.run(*plans))
    assert by_graph.runner.graphs.num_replayed == 2
    assert torch.equal(by_graph.pools.gpu[:75], eager.pools.gpu[:75])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float16, None), (torch.float16, torch.float8_e4m3fn), (torch.bfloat16, None)],
    ids=str,
)
def test_in_half_precision_graphs_and_eager_steps_agree(dtype, kv_dtype):
    """Draws of the CPU among them, and a swap; that it is near the reference is check_model's."""
    by_graph, eager = (gpu(sizes, dtype=dtype, kv_dtype=kv_dtype) for sizes in ((4,), ()))
    assert tokens(by_graph.run(*story())) == tokens(eager.run(*story()))
    assert by_graph.runner.graphs.num_replayed == 4


@pytest.mark.parametrize("graph_rows", [(), (4,)], ids=["eager", "graphs"])
def test_laying_a_step_out_is_no_part_of_its_forward_pass(graph_rows, monkeypatch):
    """By a clock that stands still but for an hour each time that a step is packed."""
    now = [0.0]
    monkeypatch.setattr(streams_module.time, "perf_counter", lambda: now[0])
    packed = Parcel.write

    def slowly(parcel, host):
        now[0] += 3600
        packed(parcel, host)

    monkeypatch.setattr(Parcel, "write", slowly)
    results = gpu(graph_rows).run(*story())
    assert now[0] >= 3600 * len(results)
    assert {result.timings.forward_s for result in results} == {0.0}
