"""The scheduler's shell: who is there, who is gone, and what reaches the core."""

import math
from dataclasses import replace

import pytest
import structlog

from services.scheduler.bystanders import REMIND_S
from services.scheduler.gauges import SchedulerCollector
from shared import codec
from shared.errors import ErrorCode
from shared.ids import Boot
from shared.liveness import SILENCE_S
from shared.messages import (
    Accepted,
    Activity,
    Adopt,
    Attach,
    Attached,
    Costs,
    Detach,
    Done,
    Drain,
    Finished,
    Heartbeat,
    Refused,
    Sampled,
    StepPlan,
    StepResult,
    StreamPosition,
    Tokens,
    Welcome,
)
from shared.sampling import DrawParams, SamplingParams
from tests.scheduler.world import READY, SUBMIT, World, answer, hear, run_plan, say, until


async def test_a_request_goes_through(world):
    gateway, executor = await world.gateway(), await world.executor()
    welcome = await hear(gateway, Welcome)
    assert (welcome.model, welcome.max_model_len) == ("toy", 64)
    await say(gateway, SUBMIT)
    assert await hear(gateway, Accepted) == Accepted("cmpl-1", 2)
    await run_plan(executor)
    await run_plan(executor, 71)
    runs = [(await hear(gateway, Tokens)).items[0] for _ in range(2)]
    assert [(run.start, run.token_ids) for run in runs] == [(0, (70,)), (1, (71,))]
    finished = await hear(gateway, Finished)
    assert (finished.reason, finished.length) == ("length", 2)
    await say(gateway, Done("cmpl-1"))
    await until(lambda: world.server.core.num_running == 0)


async def test_a_silent_executor_is_lost_and_its_work_starts_again_on_the_next(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    world.now += SILENCE_S - 0.1
    await say(gateway, Heartbeat(Boot(9)))  # the gateway lives on
    await until(lambda: world.now in world.server.gateways.values())
    world.now += 0.2
    await until(lambda: world.server.executor is None)
    assert world.server.core.counters.plans_lost == 2, "the one that ran, and the one sent ahead"
    world.now += 0.1
    second = await world.executor(b"e6", replace(READY, boot=Boot(6)))
    again = await hear(second, StepPlan)
    assert again.rows == plan.rows
    assert again.step_id != plan.step_id


async def test_a_heartbeat_keeps_an_executor(world):
    executor = await world.executor()
    for _ in range(3):
        world.now += SILENCE_S - 0.1
        await say(executor, Heartbeat(READY.boot))
        await until(lambda: world.server.executor.heard_at == world.now)
    assert world.server.executors_seen == 1


async def test_an_executor_that_starts_over_is_taken_again(world):
    executor = await world.executor()
    world.now += 2.0
    await say(executor, READY)
    assert await hear(executor, Adopt) == Adopt(world.server.boot)
    assert world.server.executors_seen == 2
    assert world.server.core.counters.executor_losses == 1


async def test_a_ready_that_crosses_its_adoption_changes_nothing(world):
    executor = await world.executor()
    await say(executor, READY)
    assert await hear(executor, Adopt) == Adopt(world.server.boot)
    assert world.server.executors_seen == 1


async def test_a_second_executor_has_to_wait(world):
    await world.executor()
    second = world.peer("step", b"e6")
    await say(second, replace(READY, boot=Boot(6)))
    await say(second, StepResult(world.server.boot, 1, ()))  # whatever it says is nobody's
    await say(second, Heartbeat(Boot(6)))
    world.now += SILENCE_S + 0.1
    await until(lambda: world.server.executor is None)
    await say(second, replace(READY, boot=Boot(6)))
    await hear(second, Adopt)
    assert world.server.executor.peer == b"e6"


async def test_an_executor_that_waits_is_told_of_once_a_minute(world):
    first = await world.executor()
    second = world.peer("step", b"e6")
    with structlog.testing.capture_logs() as events:

        async def until_told(*boots):
            await until(lambda: [each["boot"] for each in events] == [Boot(boot) for boot in boots])

        for boot in (6, 7, 6, 7):
            await say(second, replace(READY, boot=Boot(boot)))
        await until_told(6, 7)
        for _ in range(math.ceil(2 * REMIND_S / SILENCE_S)):
            world.now += SILENCE_S / 2
            await say(first, Heartbeat(Boot(5)))
            await until(lambda: world.server.executor.heard_at == world.now)
        await say(second, replace(READY, boot=Boot(7)))
        await until_told(6, 7, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"num_gpu_blocks": -1},
        {"num_gpu_blocks": 2**40},
        {"max_model_len": 0},
        {"eos_token_ids": (512,)},
        {"shape": replace(READY.shape, vocab_size=0)},
    ],
)
async def test_an_executor_with_absurd_figures_is_not_taken(world, wrong):
    liar = world.peer("step", b"e7")
    await say(liar, replace(READY, boot=Boot(7), **wrong))
    await world.executor()  # the honest one after it
    assert world.server.executor.peer == b"e5"
    assert world.server.executors_seen == 1


async def test_phases_travel_from_the_executor_to_the_gateway(world):
    gateway = await world.gateway()
    executor = world.peer("step", b"e5")
    await say(executor, Heartbeat(Boot(5), "loading weights 41 %"))
    await hear(executor, Heartbeat)
    await say(gateway, Heartbeat(Boot(9)))
    assert (await hear(gateway, Heartbeat)).phase == "loading weights 41 %"


async def test_a_gateway_that_comes_first_is_welcomed_when_the_model_is_there(world):
    gateway = await world.gateway()
    await until(lambda: world.server.gateways)
    await world.executor()
    assert (await hear(gateway, Welcome)).model == "toy"


async def test_a_silent_gateway_loses_its_requests(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    await hear(gateway, Accepted)
    await run_plan(executor)
    await hear(gateway, Tokens)
    world.now += SILENCE_S - 0.1
    await say(executor, Heartbeat(READY.boot))
    await until(lambda: world.server.executor.heard_at == world.now)
    world.now += 0.2
    await until(lambda: not world.server.gateways)
    await run_plan(executor)  # the plan in flight still holds the blocks
    await until(lambda: world.server.core.usage().num_used == 0)
    assert world.server.core.num_running == world.server.core.num_waiting == 0


async def test_a_heartbeat_brings_what_a_gateway_missed(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    await run_plan(executor)
    await run_plan(executor)
    await hear(gateway, Finished)
    behind = Heartbeat(Boot(9), streams=(StreamPosition("cmpl-1", (1,)),))
    await say(gateway, behind)
    await say(gateway, behind)  # it still stands where it stood: the second token was lost
    (run,) = (await hear(gateway, Tokens)).items
    assert (run.start, run.token_ids) == (1, (70,))
    assert (await hear(gateway, Finished)).length == 2


async def test_a_result_that_lacks_a_draw_ends_that_request_with_an_error(world):
    executor, gateway = await world.executor(), await world.gateway()
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    await say(executor, StepResult(plan.boot, plan.step_id, ()))
    finished = await hear(gateway, Finished)
    assert (finished.reason, finished.length) == ("error", 0)
    assert finished.error


async def test_a_plan_too_long_for_a_message_ends_its_requests_and_nothing_else(world, monkeypatch):
    """Four draws, each with the history that its penalty needs."""
    gateway, executor = await world.gateway(), await world.executor()
    await hear(gateway, Welcome)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 900)
    draw = DrawParams(presence_penalty=1.0)
    wish = SamplingParams(draw, n=4, max_tokens=2, ignore_eos=True)
    await say(gateway, replace(SUBMIT, request_id="cmpl-2", prompt=(65,) * 60, sampling=wish))
    for _ in range(4):
        finished = await hear(gateway, Finished)
        assert (finished.request_id, finished.reason) == ("cmpl-2", "error")
        assert "oversized" in finished.error
    await say(gateway, SUBMIT)
    for _ in range(2):
        await run_plan(executor)
    assert (await hear(gateway, Finished)).request_id == SUBMIT.request_id


async def test_a_plan_too_long_for_a_message_is_refused_though_others_are_in_flight(
    world, monkeypatch
):
    """The core takes results in the plans' order only: this refusal has to wait for its turn."""
    gateway, executor = await world.gateway(), await world.executor()
    await hear(gateway, Welcome)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 900)
    await say(gateway, SUBMIT)
    running = await hear(executor, StepPlan)
    draw = DrawParams(presence_penalty=1.0)
    wish = SamplingParams(draw, n=4, max_tokens=8, ignore_eos=True)
    await say(gateway, replace(SUBMIT, request_id="cmpl-2", prompt=(65,) * 56, sampling=wish))
    while (await hear(gateway, Accepted)).request_id != "cmpl-2":
        pass
    await answer(executor, running)  # there is room in flight: the long plan follows the second
    await hear(gateway, Tokens)
    second = await hear(executor, StepPlan)
    ids = [sent.plan.step_id for sent in world.server.core.steps.in_flight]
    assert ids == [second.step_id, second.step_id + 1], "the long one waits behind"
    assert total(world, "steps_refused") == 0
    await answer(executor, second, 71)
    ended = {(await hear(gateway, Finished)).request_id for _ in range(5)}
    assert ended == {"cmpl-1", "cmpl-2"}
    assert total(world, "steps_refused") == 2, "the one after it was as long"
    assert total(world, "results_dropped") == 0
    assert not world.server.core.steps.in_flight
    await say(gateway, replace(SUBMIT, request_id="cmpl-3"))
    for _ in range(2):
        await run_plan(executor)
    finished = await hear(gateway, Finished)
    assert (finished.request_id, finished.reason) == ("cmpl-3", "length")


async def test_an_executor_that_died_idle_costs_the_next_one_nothing(world):
    """Two plans follow from one request: the first finds it gone, the second leaves no trace."""
    gateway, executor = await world.gateway(), await world.executor()
    world.leave(executor)
    await until(lambda: not world.server.steps.send(b"e5", Heartbeat(world.server.boot)))
    assert world.server.executor is not None, "its silence is yet to be noticed"
    await say(gateway, SUBMIT)
    await until(lambda: world.server.executor is None)
    assert world.server.core.counters.plans_lost == 2
    for _ in range(21):  # more than --step-timeout
        world.now += SILENCE_S - 0.1
        await say(gateway, Heartbeat(Boot(9)))
        await hear(gateway, Heartbeat)
    another = await world.executor(b"e6", replace(READY, boot=Boot(6)))
    await until(lambda: world.server.core.steps.in_flight)
    assert world.server.step_seconds.moved_at == world.now, "its time begins now"
    for _ in range(2):
        await run_plan(another)
    assert (await hear(gateway, Finished)).reason == "length"
    assert total(world, "step_timeouts") == 0


async def test_a_deadline_passes_before_there_is_any_executor(world):
    gateway = await world.gateway()
    await say(gateway, replace(SUBMIT, deadline_s=2.0))
    await until(lambda: world.server.core.num_waiting == 1)
    world.now += 2.1
    refused = await hear(gateway, Refused)
    assert (refused.request_id, refused.code) == ("cmpl-1", ErrorCode.DEADLINE)


async def test_a_deadline_passes_while_an_executor_says_nothing(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, replace(SUBMIT, deadline_s=2.0))
    await hear(executor, StepPlan)
    world.now += 2.1
    finished = await hear(gateway, Finished)
    assert (finished.reason, finished.code) == ("error", ErrorCode.DEADLINE)
    names = {metric.name: metric for metric in SchedulerCollector(world.server).collect()}
    assert names["splitflap:deadlines_passed"].samples[0].value == 1
    assert names["splitflap:longest_wait_seconds"].samples[0].value == 0


async def test_what_the_settings_say_reaches_the_core(tmp_path):
    world = World(
        tmp_path, scheduling_policy="priority", max_pinned_share=0.25, enable_kv_bill=True
    )  # fmt: skip
    config = world.server.core.config
    await world.close()
    assert (config.scheduling_policy, config.max_pinned_share) == ("priority", 0.25)
    assert config.enable_kv_bill


async def test_what_it_is_doing_is_told_with_its_heartbeats(world):
    gateway, executor = await world.gateway(), await world.executor()

    async def told():
        await say(gateway, Heartbeat(Boot(9)))
        return (await hear(gateway, Heartbeat)).activity

    assert await told() is Activity.IDLE
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    assert await told() is Activity.BUSY
    world.now += SILENCE_S - 0.1
    assert await told() is Activity.BUSY
    for _ in range(11):  # it lives, and its step does not come back: half the limit is over
        await beat_on(world, executor, gateway)
    assert await told() is Activity.STALLED
    (sample,) = plan.rows[0].samples
    drawn = (Sampled(sample.sequence_id, 70),)
    await say(executor, StepResult(plan.boot, plan.step_id, drawn))
    await hear(gateway, Tokens)
    assert await told() is Activity.BUSY
    await run_plan(executor)
    await hear(gateway, Finished)
    assert await told() is Activity.IDLE


async def beat_on(world, executor, gateway, times=1):
    """Time goes on, each time almost until silence would tell; both are heard."""
    for _ in range(times):
        world.now += SILENCE_S - 0.1
        await say(gateway, Heartbeat(Boot(9)))
        await say(executor, Heartbeat(READY.boot))
        await hear(gateway, Heartbeat)
        await until(lambda: not world.server.executor or is_heard(world))


def is_heard(world):
    return world.server.executor.heard_at == world.now


async def test_an_executor_that_beats_and_does_not_go_on_is_given_up_for_good(world):
    """Silence never tells: it was heard a moment ago."""
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    await beat_on(world, executor, gateway, times=20)
    assert total(world, "executor_restarts") == 0
    await beat_on(world, executor, gateway)
    await hear(executor, Drain)
    await until(lambda: world.server.executor is None)
    assert total(world, "step_timeouts") == total(world, "executor_restarts") == 1
    await say(executor, READY)  # its link knows nothing of its hanging
    await hear(executor, Drain)
    (lost,) = plan.rows[0].samples
    drawn = (Sampled(lost.sequence_id, 70),)
    await say(executor, StepResult(plan.boot, plan.step_id, drawn))  # too late
    another = await world.executor(b"e6", replace(READY, boot=Boot(6)))
    await run_plan(another, 71)
    assert (await hear(gateway, Tokens)).items[0].token_ids == (71,)
    await run_plan(another, 72)
    await hear(gateway, Finished)
    assert total(world, "step_timeouts") == 1, "the next one has all the time"


async def test_a_step_that_must_take_long_is_not_given_up_for_it(world):
    slow = replace(READY, costs=Costs(32, 1e9, prefill_tokens_per_s=0.1))  # 30 s for the prompt
    gateway, executor = await world.gateway(), await world.executor(ready=slow)
    await say(gateway, SUBMIT)
    await hear(executor, StepPlan)
    await beat_on(world, executor, gateway, times=100)  # 290 s
    assert total(world, "step_timeouts") == 0
    await beat_on(world, executor, gateway, times=4)
    await hear(executor, Drain)


async def test_having_nothing_to_do_is_no_hang(world):
    gateway, executor = await world.gateway(), await world.executor()
    await beat_on(world, executor, gateway, times=25)
    assert total(world, "executor_restarts") == 0


def total(world, name):
    """One of the scheduler's counters."""
    names = {metric.name: metric for metric in SchedulerCollector(world.server).collect()}
    return names[f"splitflap:{name}"].samples[0].value


async def test_a_lost_gateways_streams_wait_for_another(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, replace(SUBMIT, context=b"c"))
    await hear(executor, StepPlan)
    world.now += SILENCE_S + 0.1
    await say(executor, Heartbeat(READY.boot))
    await until(lambda: not world.server.gateways)
    other = await world.gateway(b"g2")
    await say(other, Attach("cmpl-1", b""))
    attached = await hear(other, Attached)
    assert (attached.submit.prompt, attached.submit.context) == (SUBMIT.prompt, b"c")
    await say(other, Detach("cmpl-1"))
    await until(lambda: world.server.core.num_detached == 1)
    page = {sample.name: sample.value for metric in SchedulerCollector(world.server).collect()
            for sample in metric.samples}  # fmt: skip
    assert page["splitflap:detached_streams"] == 1
    assert page["splitflap:streams_orphaned_total"] == 1
    assert page["splitflap:streams_attached_total"] == 1
    assert page["splitflap:detached_stream_bytes"] > 0
