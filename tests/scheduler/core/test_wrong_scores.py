"""Executors that score wrongly, or are lost while they score."""

from dataclasses import replace

import pytest

from services.scheduler.core.events import StepFinished
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import (
    CancelReason,
)
from shared.sampling import FinishReason
from tests.scheduler.core.scores import runs, told


def spoil(house, change):
    """Run the plan in flight, but say what `change` makes of its scores."""
    plan = house.in_flight.pop(0)
    result = house.executor.run(plan)
    house.handle(StepFinished(house.later(), replace(result, scored=change(result.scored))))


def first_entry(**changes):
    def change(scored):
        (one,) = scored
        entry = replace(one.logprobs[0], **changes)
        return (replace(one, logprobs=(entry, *one.logprobs[1:])),)

    return change


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (lambda scored: (), "scored nothing"),
        (lambda scored: (replace(scored[0], sequence_id=999),), "scored nothing"),
        (lambda scored: (replace(scored[0], first_position=1),), "5 prompt tokens at 1; 5 at 0"),
        (lambda scored: (replace(scored[0], logprobs=scored[0].logprobs[1:]),), "4 prompt tokens"),
        (lambda scored: (replace(scored[0], logprobs=scored[0].logprobs * 2),), "10 prompt tokens"),
        (first_entry(chosen=float("nan")), "are none"),
        (first_entry(top_ids=()), "0 likeliest"),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_scores_that_are_not_what_was_asked_for_end_that_request_alone(
    house, change, flaw, max_tokens
):
    house.submit("B", prompt=3, max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("A", prompt=6, max_tokens=max_tokens, prompt_logprobs=1)
    house.step()
    spoil(house, change)
    finished = house.stream("A").finished
    assert (finished.reason, finished.code, finished.length) == (
        FinishReason.ERROR, ErrorCode.INTERNAL, 0,
    )  # fmt: skip
    assert flaw in finished.error
    assert told(house, "A") == ()
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_scores_nobody_asked_for_are_not_looked_at(house):
    house.submit("A", prompt=6, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    house.step()
    late = house.results[-1].scored
    spoil(house, lambda scored: late)
    house.run()
    assert told(house, "A") == house.scores("A")
    assert house.tokens("A") == house.solo("A")


def test_an_executor_lost_again_and_again_at_its_last_scores_ends_the_request(house):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=1)
    for _ in range(3):
        house.lose_executor()
        house.join()
    assert house.finish("A") is FinishReason.ERROR
    assert house.status("A") is Status.FINISHED


@pytest.mark.parametrize("reason", list(CancelReason))
def test_a_scored_request_given_up_in_mid_step_wants_no_scores(house, reason):
    house.submit("A", prompt=6, max_tokens=0, prompt_logprobs=1)
    house.cancel("A", reason)
    house.step()
    assert (runs(house), house.free) == ([], 16)
