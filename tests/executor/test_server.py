"""The executor process against the real protocol: in this process, and in one of its own."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from services.executor.server import Executor
from shared.errors import StartError
from shared.ids import Boot
from shared.liveness import HEARTBEAT_S
from shared.messages import PREVIOUS, Drain, Heartbeat, Move, StepFailed, StepResult
from shared.settings import ExecutorSettings
from tests.executor.model.tiny import make
from tests.executor.plain_toy import toy_logits
from tests.executor.plans import BOOT, plan, row
from tests.executor.scheduler_side import ANSWERS_WITHIN_S, SchedulerSide

ROOT = Path(__file__).parents[2]


def settings_for(folder, **more):
    return ExecutorSettings(
        model="toy", step_endpoint=f"ipc://{folder}/steps.ipc", num_gpu_blocks_override=8,
        block_size=4, max_model_len=32, **more,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(settings):
    """An executor in a thread of this process; yields the scheduler's side."""
    executor = Executor(settings)
    async with SchedulerSide(settings.step_endpoint) as scheduler:
        task = asyncio.create_task(asyncio.to_thread(executor.run))
        try:
            yield scheduler, executor, task
        finally:
            executor.stop()
            await task


@pytest.fixture
async def adopted(tmp_path):
    async with running(settings_for(tmp_path)) as (scheduler, _, _):
        await scheduler.adopt()
        yield scheduler


async def test_it_says_what_it_is_until_it_is_adopted(tmp_path):
    async with running(settings_for(tmp_path)) as (scheduler, _, _):
        await scheduler.until(lambda: len(scheduler.ready) >= 2, "the offer repeated")
        ready = await scheduler.adopt()
        assert (ready.model, ready.block_size, ready.num_gpu_blocks) == ("toy", 4, 8)
        assert (ready.num_cpu_blocks, ready.max_model_len, ready.kv_dtype) == (2048, 32, "int32")
        assert ready.costs.block_bytes == 4 * 8
        assert min(ready.costs.copy_bytes_per_s, ready.costs.prefill_tokens_per_s) > 0
        assert ready.eos_token_ids == (256,)
        await scheduler.run(plan(row()))
        offers, beats = len(scheduler.ready), len(scheduler.phases)
        await scheduler.until(lambda: len(scheduler.phases) >= beats + 3, "three beats")
        assert len(scheduler.ready) == offers


async def test_plans_become_tokens_in_their_order(adopted):
    first, second = await adopted.run(
        plan(row((65, 66, 67)), step_id=1), plan(row((PREVIOUS,), 3), step_id=2)
    )
    context = [(65, 0), (66, 1), (67, 2)]
    token = int(toy_logits(context).argmax())
    assert (first.step_id, first.sampled[0].token_id) == (1, token)
    token = int(toy_logits([*context, (token, 3)]).argmax())
    assert (second.step_id, second.sampled[0].token_id) == (2, token)
    assert second.boot == BOOT
    assert second.timings.forward_s > 0


async def test_a_bad_plan_fails_and_the_next_runs(adopted):
    bad, good = await adopted.run(plan(row(block_table=(99,))), plan(row(), step_id=2))
    assert isinstance(bad, StepFailed)
    assert "not in the pool of 8 blocks" in bad.message
    assert isinstance(good, StepResult)


async def test_plans_of_another_scheduler_are_dropped(adopted):
    adopted.send(plan(row(), step_id=1).__class__(boot=99, step_id=1, rows=()))
    (result,) = await adopted.run(plan(row(), step_id=2))
    assert result.step_id == 2


async def test_another_scheduler_makes_it_start_over(adopted):
    await adopted.run(plan(row(), step_id=5))
    adopted.boot = Boot(8)  # the heartbeats tell
    await adopted.adopt()
    (result,) = await adopted.run(plan(row((PREVIOUS,), 1), step_id=6).__class__(
        boot=8, step_id=6, rows=(row((PREVIOUS,), 1),)))  # fmt: skip
    assert "the last to run is none" in result.message
    (result,) = await adopted.run(plan(row()).__class__(boot=8, step_id=1, rows=(row(),)))
    assert isinstance(result, StepResult)  # its steps count from anywhere


async def test_a_scheduler_that_waits_for_an_executor_gets_it(adopted):
    adopted.send(Heartbeat(adopted.boot, "waiting for an executor"))
    await adopted.adopt()
    (result,) = await adopted.run(plan(row()))
    assert isinstance(result, StepResult)


async def test_a_silent_scheduler_is_given_up(adopted):
    adopted.is_beating = False
    await adopted.adopt()
    adopted.is_beating = True
    (result,) = await adopted.run(plan(row()))
    assert isinstance(result, StepResult)


async def test_drain_finishes_what_has_come_and_ends(tmp_path):
    async with running(settings_for(tmp_path, toy_step_ms=50)) as (scheduler, _, task):
        await scheduler.adopt()
        for step_id in (1, 2, 3):
            scheduler.send(plan(row(), step_id=step_id))
        scheduler.send(Drain())
        await task
        await scheduler.until(lambda: len(scheduler.results) == 3, "three results")


async def test_a_step_does_not_silence_it(tmp_path, monkeypatch):
    let_go = threading.Event()

    def stuck(self, pool, batch):
        assert let_go.wait(60)
        raise MemoryError("no room")

    async with running(settings_for(tmp_path)) as (scheduler, _, _):
        await scheduler.adopt()
        monkeypatch.setattr("services.executor.model.toy.ToyModel.forward", stuck)
        scheduler.send(plan(row()))
        beats = len(scheduler.phases)
        try:
            await scheduler.until(
                lambda: len(scheduler.phases) >= beats + 5 / HEARTBEAT_S, "5 s of heartbeats"
            )
            assert scheduler.results == []
        finally:
            let_go.set()
        await scheduler.until(lambda: scheduler.results, "the result")
        assert scheduler.results[0].message == "MemoryError: no room"  # and the process lives
        monkeypatch.undo()
        (result,) = await scheduler.run(plan(row(), step_id=2))
        assert isinstance(result, StepResult)


async def test_a_flood_of_plans_is_answered_not_kept(tmp_path, monkeypatch):
    let_go = threading.Event()
    async with running(settings_for(tmp_path, toy_step_ms=1)) as (scheduler, _, _):
        await scheduler.adopt()
        monkeypatch.setattr("services.executor.model.toy.time.sleep", lambda _: let_go.wait(60))
        for step_id in range(1, 31):
            scheduler.send(plan(row(), step_id=step_id))
        await scheduler.until(lambda: len(scheduler.results) >= 13, "refusals")
        assert all("two in flight" in failed.message for failed in scheduler.results)
        let_go.set()
        await scheduler.until(lambda: len(scheduler.results) == 30, "all are answered")


async def test_a_cpu_pool_of_the_size_asked_for_takes_blocks_and_gives_them_back(tmp_path):
    async with running(settings_for(tmp_path, num_cpu_blocks_override=2)) as (scheduler, _, _):
        ready = await scheduler.adopt()
        assert ready.num_cpu_blocks == 2
        _, over, _, back, beyond = await scheduler.run(
            plan(row((65, 66, 67, 68), 0, (3,)), step_id=1, swap_out=()),
            plan(row((80, 81, 82, 83), 0, (3,), 2), step_id=2, swap_out=(Move(3, 1),)),
            plan(row((70,), 0, (5,), 4), step_id=3),
            plan(row((69,), 4, (6, 7)), step_id=4, swap_in=(Move(1, 6),)),
            plan(step_id=5, swap_out=(Move(3, 2),)),
        )
        context = [(65 + place, place) for place in range(5)]
        assert back.sampled[0].token_id == int(toy_logits(context).argmax())
        assert min(over.timings.swap_s, back.timings.swap_s) > 0
        assert "destination 2 is not in the cpu pool of 2" in beyond.message


async def test_without_swap_space_nothing_can_be_swapped_and_no_rate_is_told(tmp_path):
    async with running(settings_for(tmp_path, swap_space=0.0)) as (scheduler, _, _):
        ready = await scheduler.adopt()
        assert (ready.num_cpu_blocks, ready.costs.copy_bytes_per_s) == (0, 0.0)
        (result,) = await scheduler.run(plan(swap_out=(Move(0, 0),)))
        assert "not in the cpu pool of 0" in result.message


def test_swap_space_that_does_not_fit_is_a_clear_error(tmp_path):
    with pytest.raises(StartError, match="--swap-space 1e"):
        Executor(settings_for(tmp_path, swap_space=1e6)).run()
    with pytest.raises(StartError, match="--num-cpu-blocks-override 1000000000000"):
        Executor(settings_for(tmp_path, num_cpu_blocks_override=10**12)).run()


def test_a_metrics_port_in_use_is_a_clear_error(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            Executor(settings_for(tmp_path, metrics_port=port)).run()


def test_a_pool_that_does_not_fit_is_a_clear_error(tmp_path):
    settings = settings_for(tmp_path).model_copy(update={"max_model_len": 64})
    with pytest.raises(StartError, match="the longest that fits is 32"):
        Executor(settings).run()


def test_a_model_that_breaks_while_loading_is_a_clear_error(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("half a file")

    monkeypatch.setattr("services.executor.model.loader.load_model", broken)
    (tmp_path / "config.json").write_text("{}")
    settings = settings_for(tmp_path).model_copy(update={"model": str(tmp_path)})
    with pytest.raises(StartError, match="loading failed with RuntimeError: half a file"):
        Executor(settings).run()


def test_the_toy_has_no_other_cache(tmp_path):
    with pytest.raises(StartError, match=r"--kv-cache-dtype int8: the toy keeps tokens"):
        Executor(settings_for(tmp_path, kv_cache_dtype="int8")).run()


def test_the_toy_has_no_weights(tmp_path):
    with pytest.raises(StartError, match=r"--quantization int8: the toy has no weights"):
        Executor(settings_for(tmp_path, quantization="int8")).run()


async def test_a_model_in_int8_answers(tmp_path):
    make("llama", tmp_path)
    settings = settings_for(tmp_path, quantization="int8", dtype="float32")
    settings = settings.model_copy(update={"model": str(tmp_path)})
    async with running(settings) as (scheduler, _, _):
        await scheduler.adopt()
        (result,) = await scheduler.run(plan(row()))
        assert isinstance(result, StepResult)


def test_a_cache_that_no_kernel_keeps_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text("not even JSON")
    settings = settings_for(tmp_path, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(StartError, match=r"fp8_e4m3: this device keeps .* auto or bf16 or int8"):
        Executor(settings.model_copy(update={"model": str(tmp_path)})).run()


async def test_it_says_what_its_cache_stores_and_what_a_block_of_it_takes(tmp_path):
    make("llama", tmp_path)  # 3 layers, 2 key-value heads of 16 numbers
    settings = settings_for(tmp_path, kv_cache_dtype="int8")
    settings = settings.model_copy(update={"model": str(tmp_path)})
    async with running(settings) as (scheduler, _, _):
        ready = await scheduler.adopt()
        assert ready.kv_dtype == "int8"
        assert ready.costs.block_bytes == 4 * (2 * 3 * 2) * (16 + 2)
        (result,) = await scheduler.run(plan(row()))
        assert isinstance(result, StepResult)


# --------------------------------------------------------------------------- its own process


@contextlib.asynccontextmanager
async def process(folder, *flags):
    """`splitflap executor` as a process; yields it and the scheduler's side."""
    endpoint = f"ipc://{folder}/steps.ipc"
    async with SchedulerSide(endpoint) as scheduler:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "executor", "--step-endpoint", endpoint,
            "--num-gpu-blocks-override", "8", "--block-size", "4", *flags,
            cwd=ROOT, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            yield child, scheduler
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            child._transport.close()


async def ended(child):
    """The exit status of a process that ends soon."""
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        return await child.wait()


TOY = ("--model", "toy", "--max-model-len", "32")


@pytest.mark.stack
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_serves_and_ends_at_a_signal(tmp_path, number):
    async with process(tmp_path, *TOY) as (child, scheduler):
        await scheduler.adopt()
        (result,) = await scheduler.run(plan(row((65, 66))))
        assert result.sampled[0].token_id == int(toy_logits([(65, 0), (66, 1)]).argmax())
        child.send_signal(number)
        assert await ended(child) == 0
        log = (await child.stderr.read()).decode()
        assert "pool: 8 blocks of 4 tokens = 32 tokens, 1.0 requests of 32" in log


@pytest.mark.stack
async def test_a_signal_finishes_the_step_that_runs(tmp_path):
    async with process(tmp_path, *TOY, "--toy-step-ms", "300") as (child, scheduler):
        await scheduler.adopt()
        scheduler.send(plan(row(), step_id=1))
        scheduler.send(plan(row(), step_id=2))
        await scheduler.until(lambda: scheduler.results, "the first result")
        child.terminate()
        assert await ended(child) == 0
        await scheduler.until(lambda: len(scheduler.results) == 2, "the second result")


@pytest.mark.stack
async def test_a_process_that_stood_still_starts_over(tmp_path):
    async with process(tmp_path, *TOY) as (child, scheduler):
        await scheduler.adopt()
        await scheduler.run(plan(row(), step_id=9))
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.sleep(3.5)  # the silence after which either side gives up the other
        os.kill(child.pid, signal.SIGCONT)
        await scheduler.adopt()
        (result,) = await scheduler.run(plan(row()))
        assert isinstance(result, StepResult)


@pytest.mark.stack
async def test_a_process_that_cannot_start_says_why(tmp_path):
    async with process(tmp_path, "--model", "toy", "--max-model-len", "64") as (child, _):
        _, log = await child.communicate()
        assert child.returncode == 2
        assert "the longest that fits is 32" in log.decode()
