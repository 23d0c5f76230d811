"""Plans that take their time, as on a GPU: the next is launched meanwhile, and no third."""

import asyncio
import threading

import pytest
import torch

from services.executor.host_runner import HostRunner
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from services.executor.server import Executor
from shared.messages import PREVIOUS, StepFailed, StepResult
from tests.executor.plans import LIMITS, plan, row
from tests.executor.scheduler_side import ANSWERS_WITHIN_S, SchedulerSide
from tests.executor.test_server import running, settings_for


class Slow:
    """A plan of which nobody hears before it may be done."""

    def __init__(self, launched, runner):
        self.launched, self.runner = launched, runner

    def is_done(self):
        return self.runner.may_end.is_set()

    def finish(self):
        assert self.runner.may_end.wait(60)
        if self.runner.error is not None:
            raise self.runner.error
        return self.launched.finish()

    @property
    def tokens(self):
        return self.launched.tokens


class SlowRunner(HostRunner):
    """Its plans are done when `may_end` is set."""

    def __init__(self, model, pools):
        super().__init__(model, pools)
        self.may_end, self.launched, self.error = threading.Event(), [], None
        self.launch_error = None

    def launch(self, plan, flat, before):
        self.launched.append(plan.step_id)
        if self.launch_error is not None:
            raise self.launch_error
        return Slow(super().launch(plan, flat, before), self)


@pytest.fixture
async def house(tmp_path, monkeypatch):
    """The scheduler's side of an adopted executor, and its runner."""
    made = []

    def interpreter(model, pools, longest, drawing, on_failure, runner):
        made.append(SlowRunner(model, pools))
        return Interpreter(model, pools, longest, drawing, on_failure, made[0])

    monkeypatch.setattr("services.executor.server.Interpreter", interpreter)
    async with running(settings_for(tmp_path)) as (scheduler, executor, _):
        await scheduler.adopt()
        await scheduler.until(lambda: made, "its runner")
        try:
            yield scheduler, made[0], executor
        finally:
            made[0].may_end.set()


def three():
    return [plan(row((65,)), step_id=1)] + [
        plan(row((PREVIOUS,), step - 1), step_id=step) for step in (2, 3)
    ]


async def test_a_second_plan_is_launched_before_the_first_is_done_and_no_third(house):
    scheduler, runner, _ = house
    for each in three():
        scheduler.send(each)
    await scheduler.until(lambda: len(runner.launched) == 2, "two launched")
    beats = len(scheduler.phases)
    await scheduler.until(lambda: len(scheduler.phases) >= beats + 2, "two beats")
    assert (runner.launched, scheduler.results) == ([1, 2], [])
    runner.may_end.set()
    await scheduler.until(lambda: len(scheduler.results) == 3, "three results")
    assert [result.step_id for result in scheduler.results] == [1, 2, 3]


async def test_what_is_under_way_is_finished_before_it_ends(house):
    scheduler, runner, executor = house
    for each in three()[:2]:
        scheduler.send(each)
    await scheduler.until(lambda: len(runner.launched) == 2, "two launched")
    executor.stop()
    await asyncio.to_thread(runner.may_end.set)
    await scheduler.until(lambda: len(scheduler.results) == 2, "both results")


@pytest.fixture
def hands():
    model = ToyModel()
    pools = KVPools(model, LIMITS.num_gpu_blocks, LIMITS.block_size)
    runner = SlowRunner(model, pools)
    runner.may_end.set()
    return runner, Interpreter(model, pools, 24, runner=runner)


def test_a_plan_that_breaks_when_it_is_read_takes_the_one_made_from_it_along(hands):
    runner, interpreter = hands
    first, second, other = (
        interpreter.launch(each) for each in (*three()[:2], plan(row((70,), 0, (3,), 2), step_id=3))
    )
    runner.error = MemoryError("no room")
    assert interpreter.finish(first).message == "MemoryError: no room"
    runner.error = None
    failed = interpreter.finish(second)
    assert isinstance(failed, StepFailed)
    assert failed.message == (
        "bad plan: row of sequence 1: PREVIOUS, but step 1 drew nothing for it"
    )
    assert isinstance(interpreter.finish(other), StepResult)


def test_a_lost_gpu_is_no_failed_plan_but_the_end(hands):
    runner, interpreter = hands
    first = interpreter.launch(three()[0])
    runner.error = torch.AcceleratorError("CUDA error: an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        interpreter.finish(first)


def test_nor_is_one_that_is_lost_while_a_plan_is_launched(hands):
    runner, interpreter = hands
    runner.launch_error = torch.AcceleratorError("CUDA error: an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        interpreter.launch(three()[0])
    runner.launch_error = MemoryError("no room")  # which loses no more than the plan
    failed = interpreter.launch(plan(row((70,), 0, (3,), 2), step_id=3)).failed
    assert failed.message == "MemoryError: no room"


async def test_an_executor_whose_gpu_is_lost_ends_for_another_to_start(tmp_path, monkeypatch):
    made = []

    def interpreter(model, pools, longest, drawing, on_failure, runner):
        made.append(SlowRunner(model, pools))
        return Interpreter(model, pools, longest, drawing, on_failure, made[0])

    monkeypatch.setattr("services.executor.server.Interpreter", interpreter)
    settings = settings_for(tmp_path)
    executor = Executor(settings)
    async with SchedulerSide(settings.step_endpoint) as scheduler:
        task = asyncio.create_task(asyncio.to_thread(executor.run))
        await scheduler.adopt()
        await scheduler.until(lambda: made, "its runner")
        made[0].launch_error = torch.AcceleratorError("CUDA error: an illegal memory access")
        scheduler.send(three()[0])
        await asyncio.wait({task}, timeout=ANSWERS_WITHIN_S)
        executor.stop()
        with pytest.raises(torch.AcceleratorError):
            await task
        assert scheduler.results == []
