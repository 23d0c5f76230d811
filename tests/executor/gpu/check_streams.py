"""Two plans under way on streams that run as late as they may: each wait is there, and needed."""

from collections import deque

import pytest

from shared.messages import PREVIOUS, Move, StepResult
from tests.executor.gpu.late_streams import LateStreams
from tests.executor.gpu.machines import gpu, plain
from tests.executor.plans import plan, row
from tests.kernels.decoders import Sizes

SEEDS = range(6)
SMALL = Sizes(hidden=16, inner=16, heads=1, kv_heads=1, head_dim=16, layers=1, vocab=61)


def story():
    """Sequence 2 is swapped out of a block that it just wrote; others take the block meanwhile."""
    return [
        plan(row((3, 4, 5, 6, 7), 0, (2, 5), 1), row((40, 41), 0, (9,), 2), step_id=1),
        plan(row((PREVIOUS,), 5, (2, 5), 1), row((PREVIOUS,), 2, (9,), 2), step_id=2),
        plan(row((PREVIOUS,), 6, (2, 5), 1), step_id=3, swap_out=(Move(9, 0),)),
        plan(row((PREVIOUS,), 7, (2, 5), 1), row((20, 21, 22), 0, (9,), 3), step_id=4),
        plan(
            row((PREVIOUS,), 8, (2, 5, 7), 1),
            row((8,), 3, (11,), 2),
            row((PREVIOUS,), 3, (9,), 3),
            step_id=5,
            swap_in=(Move(0, 11),),
        ),
        plan(
            row((PREVIOUS,), 9, (2, 5, 9), 1),
            row((PREVIOUS,), 4, (11, 6), 2),
            step_id=6,
            swap_out=(Move(9, 1),),
            copies=(Move(7, 9),),
        ),
        plan(
            row((PREVIOUS,), 10, (2, 5, 9), 1),
            row((30,), 4, (12, 13), 3),
            step_id=7,
            swap_in=(Move(1, 12),),
        ),
        plan(row((PREVIOUS,), 5, (12, 13), 3), row((PREVIOUS,), 11, (2, 5, 9), 1), step_id=8),
    ]


def outcome(machine, plans):
    """What each plan draws, two of them under way."""
    pending, made = deque(), []

    def finish_first():
        first = pending.popleft()
        result = machine.interpreter.finish(first)
        assert isinstance(result, StepResult), result
        marks = first.launched.marks
        assert marks.moved is None or marks.moved.is_done()
        made.append([(one.sequence_id, one.token_id) for one in result.sampled])

    for each in plans:
        if len(pending) == 2:
            finish_first()
        pending.append(machine.interpreter.launch(each))
    while pending:
        finish_first()
    return made


@pytest.fixture(scope="module")
def wanted():
    return [
        [(one.sequence_id, one.token_id) for one in result.sampled]
        for result in plain(SMALL).run(*story())
    ]


def test_in_whatever_order_the_streams_run_the_tokens_are_the_same(wanted):
    orders = set()
    for seed in SEEDS:
        streams = LateStreams(seed)
        assert outcome(gpu((), streams, SMALL), story()) == wanted
        orders.add(tuple(streams.ran))
    assert len(orders) > 1


def test_by_graphs_too(wanted):
    machine = gpu((2, 4), LateStreams(1), SMALL)
    assert outcome(machine, story()) == wanted
    assert machine.runner.graphs.num_replayed >= 4


@pytest.mark.parametrize("deaf", ["compute", "transfer"])
def test_without_its_waits_a_stream_spoils_them(wanted, deaf):
    outcomes = [outcome_or_fault(LateStreams(seed, (deaf,))) for seed in SEEDS]
    assert any(made != wanted for made in outcomes)


def outcome_or_fault(streams):
    try:
        return outcome(gpu((), streams, SMALL), story())
    except AssertionError as fault:
        return str(fault)


def test_a_host_that_does_not_wait_reads_nothing(wanted):
    assert outcome_or_fault(LateStreams(0, is_hasty=True)) != wanted


def test_a_plan_is_launched_before_the_one_it_goes_on_from_has_run(wanted):
    streams = LateStreams(0)
    machine = gpu((), streams, SMALL)
    streams.ran.clear()
    first, second = (machine.interpreter.launch(each) for each in story()[:2])
    assert streams.ran == []
    assert not first.is_done()
    made = [machine.interpreter.finish(each) for each in (first, second)]
    assert [[(one.sequence_id, one.token_id) for one in result.sampled] for result in made] == (
        wanted[:2]
    )
