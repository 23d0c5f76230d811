"""Any plan is refused and nothing happened, or it runs and touches what is its own."""

import pytest
import torch
from hypothesis import given

from services.executor.model.toy import VOCAB_SIZE
from shared.codec import decode, encode
from shared.errors import WireError
from shared.messages import FROM_EXECUTOR, PREVIOUS, StepFailed, StepResult
from tests.executor.hands import Feverish, Hands
from tests.executor.lawful_plans import ANY_PLANS, lawful_plans, wild_plans
from tests.executor.plans import LIMITS, row
from tests.fuzzing import many_cases


def hands_after_step_4():
    """Sequence 1 drew a token and sequence 2 drew in vain; every place holds something."""
    hands = Hands(Feverish())
    hands.pools.gpu.copy_(torch.arange(hands.pools.gpu.numel()).view_as(hands.pools.gpu) % 400)
    hands.pools.cpu.copy_(torch.arange(hands.pools.cpu.numel()).view_as(hands.pools.cpu) % 300)
    result = hands.run(row((65, 66), 0, (0,)), row((90,), 0, (1,), sequence_id=2), step_id=4)
    (drawn,) = result.sampled
    return hands, {1: drawn.token_id, 2: None}


def expected_memory(memory, plan, previous):
    """What the pools must hold afterwards, block by block and token by token."""
    gpu, cpu = memory
    for moves, source, destination in (
        (plan.swap_out, gpu, cpu), (plan.swap_in, cpu, gpu), (plan.copies, gpu, gpu),
    ):  # fmt: skip
        before = source.clone()
        for move in moves:
            destination[move.destination] = before[move.source]
    size = LIMITS.block_size
    for each in plan.rows:
        ids = [previous[each.sequence_id] if i == PREVIOUS else i for i in each.token_ids]
        if None in ids:
            continue  # it went on from a token that does not exist
        for position, token in enumerate(ids, each.first_position):
            place = torch.tensor([token, position])
            gpu[each.block_table[position // size], position % size] = place
    return gpu, cpu


def is_safe(plan, previous):
    """The laws again, one token at a time: may native code see this plan?"""
    gpu, cpu, size = range(8), range(4), LIMITS.block_size
    for moves, source, destination in (
        (plan.swap_out, gpu, cpu), (plan.swap_in, cpu, gpu), (plan.copies, gpu, gpu),
    ):  # fmt: skip
        if any(m.source not in source or m.destination not in destination for m in moves):
            return False
    written = [
        row.block_table[p // size] if p // size < len(row.block_table) else None
        for row in plan.rows
        for p in range(row.first_position, row.first_position + len(row.token_ids))
    ]
    every = [block for row in plan.rows for block in row.block_table]
    return (
        all(block in gpu for block in every)
        and all(row.token_ids and row.first_position >= 0 for row in plan.rows)
        and all(row.first_position + len(row.token_ids) <= 24 for row in plan.rows)
        and all(block is not None and every.count(block) == 1 for block in written)
        and all(
            token in range(512) or (token == PREVIOUS and row.sequence_id in previous)
            for row in plan.rows
            for token in row.token_ids
        )
        and all(b in range(512) for row in plan.rows for s in row.samples for b in s.banned_ids)
    )


def check_result(result, plan):
    failed = {error.sequence_id for error in result.row_errors}
    assert len(failed) == len(result.row_errors)
    rows = [each for each in plan.rows if each.sequence_id not in failed]
    asked = [sample for each in rows for sample in each.samples]
    assert [made.sequence_id for made in result.sampled] == [s.sequence_id for s in asked]
    for made, sample in zip(result.sampled, asked, strict=True):
        if sample.draw is None:
            assert made.token_id is None
        else:
            assert 0 <= made.token_id < VOCAB_SIZE
            assert made.token_id not in sample.banned_ids
            assert made.token_id in (sample.draw.allowed_token_ids or range(VOCAB_SIZE))
        assert (made.logprobs is None) == (sample.num_top is None)
        assert made.logprobs is None or len(made.logprobs.top_ids) == sample.num_top
    scores = [(each.sequence_id, each.score) for each in rows if each.score]
    assert [(made.sequence_id, len(made.logprobs)) for made in result.scored] == [
        (name, len(score.token_ids)) for name, score in scores
    ]
    if may_come_by_wire(plan):
        assert decode(encode(result), FROM_EXECUTOR) == result


def may_come_by_wire(plan):
    """Whether its numbers have a wire form; in here some are larger."""
    try:
        encode(plan)
    except WireError:
        return False
    return True


def run_and_check(plan):
    hands, previous = hands_after_step_4()
    before = hands.memory()
    result = hands.interpreter.run(plan)
    if isinstance(result, StepFailed):
        assert result.message.startswith("bad plan: ")
        assert all(map(torch.equal, before, hands.memory()))
    else:
        assert is_safe(plan, previous)
        assert all(map(torch.equal, expected_memory(before, plan, previous), hands.memory()))
        check_result(result, plan)
    return result


@given(lawful_plans())
def test_a_lawful_plan_runs_and_touches_what_is_its_own(plan):
    assert isinstance(run_and_check(plan), StepResult)


@pytest.mark.fuzz
@many_cases
@given(ANY_PLANS)
def test_a_plan_of_any_numbers_is_refused_or_touches_what_is_its_own(plan):
    run_and_check(plan)


@pytest.mark.fuzz
@many_cases
@given(wild_plans())
def test_a_wild_plan_is_refused_or_touches_what_is_its_own(plan):
    run_and_check(plan)
