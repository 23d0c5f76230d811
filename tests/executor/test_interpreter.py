import numpy as np
import pytest
import torch

from services.executor.model.toy import ToyModel
from services.executor.plan_check import BadPlan
from shared.messages import PREVIOUS, Move, RowError, StepFailed, StepResult
from shared.sampling import DrawParams
from tests.executor.hands import Hands
from tests.executor.plain_sampler import is_right
from tests.executor.plain_toy import toy_logits
from tests.executor.plans import BOOT, plan, row, sample


@pytest.fixture
def hands():
    return Hands()


def greedy(*tokens):
    """What the toy writes after `tokens`."""
    return int(toy_logits([(token, place) for place, token in enumerate(tokens)]).argmax())


def test_a_prompt_in_chunks_draws_only_at_its_end(hands):
    assert hands.draws(row((65, 66, 67), 0, (3,), samples=[])) == {}
    assert hands.draws(row((68, 69), 3, (3, 1)), step_id=2) == {1: greedy(65, 66, 67, 68, 69)}


def test_the_result_names_the_plan_and_the_time(hands):
    result = hands.run(row(), step_id=12)
    assert (result.boot, result.step_id) == (BOOT, 12)
    assert min(result.timings.forward_s, result.timings.sample_s) > 0


def test_a_plan_without_rows_only_moves(hands):
    hands.draws(row((65, 66, 67, 68), 0, (3,)))
    assert hands.draws(copies=(Move(3, 4),), step_id=2) == {}
    assert hands.draws(row((69,), 4, (4, 0)), step_id=3) == {1: greedy(65, 66, 67, 68, 69)}


def test_parts_run_in_their_order(hands):
    """Block 0 leaves, another comes in its place and is copied, and a row goes on in the copy."""
    hands.draws(row((65, 66, 67, 68), 0, (0,)))
    hands.draws(row((75, 76, 77, 78), 0, (1,)), step_id=2)
    hands.draws(swap_out=(Move(1, 2),), step_id=3)
    drawn = hands.draws(
        row((79,), 4, (5, 6), sequence_id=2),
        step_id=4, swap_out=(Move(0, 3),), swap_in=(Move(2, 0),), copies=(Move(0, 5),),
    )  # fmt: skip
    assert drawn == {2: greedy(75, 76, 77, 78, 79)}
    drawn = hands.draws(row((69,), 4, (7, 4)), step_id=5, swap_in=(Move(3, 7),))
    assert drawn == {1: greedy(65, 66, 67, 68, 69)}


def test_previous_is_the_token_drawn_before(hands):
    token = hands.draws(row((65, 66)))[1]
    assert hands.draws(row((PREVIOUS,), 2), step_id=2) == {1: greedy(65, 66, token)}


def test_each_sample_of_a_row_may_go_on_by_itself(hands):
    draw = DrawParams(temperature=2.0)
    fork = [sample(i, draw, index=i, seed=5) for i in (1, 2)]
    tokens = hands.draws(row((65, 66, 67, 68), 0, (0,), samples=fork))
    drawn = hands.draws(
        row((PREVIOUS,), 4, (0, 1), sequence_id=1),
        row((PREVIOUS,), 4, (0, 2), sequence_id=2),
        step_id=2,
    )
    assert drawn == {i: greedy(65, 66, 67, 68, tokens[i]) for i in (1, 2)}


def test_the_die_is_named_by_the_place_of_the_new_token(hands):
    draw = sample(draw=DrawParams(temperature=3.0), seed=77, index=2)
    context = [(65 + place, place) for place in range(6)]
    for step_id, first in ((1, 0), (2, 5)):  # as a whole, and as the last chunk
        ids = [token for token, _ in context[first:]]
        token = hands.draws(row(ids, first, (0, 1), samples=[draw]), step_id=step_id)[1]
        assert is_right(token, toy_logits(context), draw, position=6)


BAD_PLANS = [
    plan(row(), row((65,), 0, (99,), sequence_id=2), step_id=2, copies=(Move(0, 1),)),
    plan(row((PREVIOUS,), 0, (0,), sequence_id=9), step_id=2, swap_out=(Move(0, 1),)),
    plan(row(samples=[sample(num_top=21)]), step_id=2),
    plan(step_id=2, copies=(Move(0, 1), Move(1, 2))),
]


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_a_bad_plan_changes_nothing(hands, bad):
    token = hands.draws(row((65, 66)), swap_out=(Move(0, 0),))[1]
    before = hands.memory()
    failed = hands.interpreter.run(bad)
    assert isinstance(failed, StepFailed)
    assert (failed.boot, failed.step_id) == (BOOT, 2)
    assert failed.message.startswith("bad plan: ")
    assert all(map(torch.equal, before, hands.memory()))
    # Not even the memory of the step before: the plan may come again, put right.
    assert hands.draws(row((PREVIOUS,), 2), step_id=2) == {1: greedy(65, 66, token)}


def test_the_plan_after_a_failed_one_may_not_use_what_it_did_not_draw(hands):
    hands.draws(row((65, 66)))
    assert isinstance(hands.run(row((PREVIOUS,), 2, (88,)), step_id=2), StepFailed)
    failed = hands.run(row((PREVIOUS,), 3), step_id=3)
    assert "PREVIOUS means step 2, the last to run is step 1" in failed.message


class Feverish(ToyModel):
    """A toy whose logits after token 90 are nonsense, and that breaks at token 91."""

    def forward(self, pool, batch):
        logits = super().forward(pool, batch)
        tokens = batch.token_ids[batch.logit_tokens]
        logits[tokens == 90] = np.nan
        if (tokens == 91).any():
            raise RuntimeError("the forward pass broke")
        return logits


def test_failures_are_told():
    hands = Hands(Feverish())
    assert isinstance(hands.run(row((65, 66))), StepResult)
    assert isinstance(hands.run(row((65, 91), 0, (2,)), step_id=2), StepFailed)
    assert isinstance(hands.run(step_id=1), StepFailed)
    assert hands.failures == [(2, RuntimeError), (1, BadPlan)]


def test_nonsense_ends_its_row_alone():
    hands = Hands(Feverish())
    result = hands.run(
        row((65, 90), 0, (0,)), row((65, 66), 0, (1,), sequence_id=2), row((90,), 0, (2,), 3)
    )
    assert [s.token_id for s in result.sampled] == [greedy(65, 66)]
    assert result.row_errors == (
        RowError(1, "its logits are not finite"),
        RowError(3, "its logits are not finite"),
    )
    # The plan that was made meanwhile goes on from a token that does not exist.
    result = hands.run(row((PREVIOUS,), 2, (0,)), row((PREVIOUS,), 2, (1,), 2), step_id=2)
    assert [s.sequence_id for s in result.sampled] == [2]
    assert result.row_errors == (RowError(1, "its token of the step before failed"),)
    result = hands.run(row((PREVIOUS,), 3, (0,)), row((PREVIOUS,), 3, (1,), 2), step_id=3)
    assert [s.sequence_id for s in result.sampled] == [2]
    assert [error.sequence_id for error in result.row_errors] == [1]


def test_a_plan_that_breaks_half_way_fails_and_the_next_runs():
    hands = Hands(Feverish())
    hands.draws(row((65, 66)))
    failed = hands.run(row((91,), 2), step_id=2)
    assert failed.message == "RuntimeError: the forward pass broke"
    assert "drew nothing for it" in hands.run(row((PREVIOUS,), 3), step_id=3).message
    assert hands.draws(row((65, 66)), step_id=3) == {1: greedy(65, 66)}


def test_after_starting_over_steps_count_anew_and_nothing_was_drawn(hands):
    hands.draws(row((65, 66)), step_id=100)
    hands.interpreter.forget()
    assert "the last to run is none" in hands.run(row((PREVIOUS,), 2), step_id=101).message
    assert hands.draws(row((65, 66)), step_id=1) == {1: greedy(65, 66)}
