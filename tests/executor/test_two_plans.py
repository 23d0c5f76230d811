"""Two plans in flight: the second is there before the first is done, and knows what it drew."""

import asyncio
import itertools
import statistics
import threading
import time
from dataclasses import replace

import pytest

from services.executor.model.toy import ToyModel
from shared.ids import Boot
from shared.messages import PREVIOUS, Move, StepFailed, StepResult
from tests.executor.plain_toy import toy_logits
from tests.executor.plans import plan, row
from tests.executor.test_server import running, settings_for


class Gate:
    """Holds each forward pass until it may go on; knows when each began and ended."""

    def __init__(self, monkeypatch):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.times = []
        forward = ToyModel.forward

        def gated(model, pool, batch):
            began = time.monotonic()
            self.begun.set()
            assert self.may_end.wait(60)
            logits = forward(model, pool, batch)
            self.times.append((began, time.monotonic()))
            return logits

        monkeypatch.setattr(ToyModel, "forward", gated)

    async def wait_for_a_step(self):
        assert await asyncio.to_thread(self.begun.wait, 30)


@pytest.fixture
async def house(tmp_path, monkeypatch):
    """The scheduler's side of an adopted executor, and the gate of its model."""
    async with running(settings_for(tmp_path, toy_step_ms=20)) as (scheduler, _, _):
        await scheduler.adopt()
        gate = Gate(monkeypatch)
        try:
            yield scheduler, gate
        finally:
            gate.may_end.set()


async def until_idle(scheduler):
    """Everything sent so far has reached the executor: two beats came after it."""
    beats = len(scheduler.phases)
    await scheduler.until(lambda: len(scheduler.phases) >= beats + 2, "two beats")


async def test_a_chain_of_previous_is_what_one_plan_after_the_other_draws(house):
    scheduler, gate = house
    gate.may_end.set()
    results = await scheduler.run(
        plan(row((65, 66, 67, 68), 0, (2,)), step_id=1),
        *(plan(row((PREVIOUS,), 2 + step, (2, 0, 4)), step_id=step) for step in range(2, 9)),
    )
    tokens = [65, 66, 67, 68]
    for step, result in enumerate(results, start=1):
        assert result.step_id == step
        tokens.append(int(toy_logits([(t, p) for p, t in enumerate(tokens)]).argmax()))
        assert result.sampled[0].token_id == tokens[-1]


async def test_moves_of_the_second_plan_come_after_the_first_has_written(house):
    """Plan 1 fills block 2; plan 2, sent while it runs, swaps it out; plan 3 brings it back."""
    scheduler, gate = house
    scheduler.send(plan(row((65, 66, 67, 68), 0, (2,)), step_id=1))
    await gate.wait_for_a_step()
    scheduler.send(plan(row((90,), 0, (5,), 2), step_id=2, swap_out=(Move(2, 0),)))
    await until_idle(scheduler)
    assert scheduler.results == []
    gate.may_end.set()
    back = plan(row((69,), 4, (7, 1)), step_id=3, swap_in=(Move(0, 7),))
    *_, result = await scheduler.run(back)
    await scheduler.until(lambda: len(scheduler.results) == 3, "three results")
    context = [(65 + place, place) for place in range(5)]
    (result,) = [result for result in scheduler.results if result.step_id == 3]
    assert result.sampled[0].token_id == int(toy_logits(context).argmax())


async def test_no_time_passes_between_plans_that_are_there(house):
    scheduler, gate = house
    gate.may_end.set()
    plans = [plan(row((65,)), step_id=1)]
    plans += [plan(row((PREVIOUS,), 1), step_id=step) for step in range(2, 17)]
    await scheduler.run(*plans[:1])
    for chunk in (plans[1:9], plans[9:]):
        await scheduler.run(*chunk)
    gaps = [began - ended for (_, ended), (began, _) in itertools.pairwise(gate.times)]
    assert len(gaps) == 15
    assert statistics.median(gaps) < 0.01  # a step takes 0.02 s


async def test_a_scheduler_that_is_lost_takes_both_its_plans_with_it(house):
    scheduler, gate = house
    scheduler.send(plan(row((65, 66)), step_id=1))
    await gate.wait_for_a_step()
    scheduler.send(plan(row((PREVIOUS,), 2), step_id=2, copies=(Move(0, 3),)))
    await until_idle(scheduler)
    scheduler.boot = Boot(8)  # the heartbeats tell
    await scheduler.adopt()
    gate.may_end.set()
    fresh = replace(plan(row((70, 71), 0, (1,)), step_id=1), boot=8)
    (result,) = await scheduler.run(fresh)
    assert (result.boot, result.step_id) == (8, 1)
    assert result.sampled[0].token_id == int(toy_logits([(70, 0), (71, 1)]).argmax())
    assert len(gate.times) == 2  # plan 1 was running; plan 2 never ran
    assert len(scheduler.results) == 1  # and nobody hears of either


async def test_a_plan_that_fails_takes_the_one_made_from_it_along_and_no_more(house, monkeypatch):
    scheduler, gate = house
    gate.may_end.set()
    first, bad, built_on_it, after = await scheduler.run(
        plan(row((65, 66)), step_id=1),
        plan(row((PREVIOUS,), 2, (99,)), step_id=2),
        plan(row((PREVIOUS,), 3), row((80,), 0, (4,), 2), step_id=3),
        plan(row((67,), 2), row((80,), 0, (4,), 2), step_id=4),
    )
    assert isinstance(first, StepResult)
    assert "not in the pool of 8 blocks" in bad.message
    assert isinstance(built_on_it, StepFailed)
    assert "row of sequence 1: PREVIOUS means step 2, the last to run is step 1" in (
        built_on_it.message
    )
    tokens = {sampled.sequence_id: sampled.token_id for sampled in after.sampled}
    assert tokens[1] == int(toy_logits([(65, 0), (66, 1), (67, 2)]).argmax())
    assert tokens[2] == int(toy_logits([(80, 0)]).argmax())


async def test_a_plan_that_breaks_takes_the_one_made_from_it_along_and_no_more(house, monkeypatch):
    scheduler, gate = house
    scheduler.send(plan(row((65, 66)), step_id=1))
    await gate.wait_for_a_step()
    scheduler.send(plan(row((PREVIOUS,), 2), step_id=2))
    await until_idle(scheduler)

    def broken(self, logits, *_):
        raise MemoryError("no room")

    monkeypatch.setattr("services.executor.host_runner.read_out", broken)
    gate.may_end.set()
    await scheduler.until(lambda: len(scheduler.results) == 2, "both failures")
    one, two = scheduler.results
    assert one.message == "MemoryError: no room"
    assert "row of sequence 1: PREVIOUS, but step 1 drew nothing for it" in two.message
