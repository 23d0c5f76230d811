"""Messages that decode and are wrong: dropped and counted, and nothing else is disturbed."""

from dataclasses import replace

import pytest

from services.scheduler import server as server_module
from services.scheduler.gauges import SchedulerCollector
from shared.errors import ErrorCode
from shared.ids import Boot
from shared.messages import (
    Accepted,
    Attach,
    Cancel,
    CancelReason,
    Detach,
    Done,
    Finished,
    Heartbeat,
    PositionLogprobs,
    Refused,
    RowError,
    Sampled,
    Scored,
    StepFailed,
    StepPlan,
    StepResult,
    StreamPosition,
    Tokens,
    Welcome,
)
from shared.metrics import REGISTRY
from shared.sampling import SamplingParams
from tests.scheduler.world import READY, SUBMIT, World, hear, run_plan, say, until


@pytest.fixture
async def world(tmp_path, monkeypatch):
    """One plan in flight: the executors here answer one after the other."""
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    world = World(tmp_path, plans_in_flight=1)
    yield world
    await world.close()


NAN = float("nan")


def dropped(link, reason):
    labels = {"link": link, "reason": reason}
    return REGISTRY.get_sample_value("splitflap:messages_dropped_total", labels) or 0.0


def metric(world, name):
    """A metric of this scheduler as its page shows it."""
    for family in SchedulerCollector(world.server).collect():
        for sample in family.samples:
            if sample.name == f"splitflap:{name}" and not sample.labels:
                return sample.value
    raise AssertionError(f"no metric is called {name}")


async def all_is_well(world, gateway, executor, name="witness"):
    """A request goes through, and every block comes back."""
    await say(gateway, replace(SUBMIT, request_id=name))
    await run_plan(executor)
    await run_plan(executor, 71)
    while (finished := await hear(gateway, Finished)).request_id != name:
        pass
    assert (finished.reason, finished.length) == ("length", 2)
    await say(gateway, Done(name))
    await until(lambda: world.server.core.num_finished_kept == 0)
    assert world.server.core.usage().num_used == 0


# ------------------------------------------------------------------ the request link


async def test_words_of_a_gateway_about_requests_there_never_were_change_nothing(world):
    gateway, executor = await world.gateway(), await world.executor()
    for word in (
        Cancel("nobody", None, CancelReason.CLIENT_GONE),
        Cancel("nobody", -(2**63), CancelReason.STOP_STRING),
        Done("nobody"),
        Done(""),
    ):
        await say(gateway, word)
    await say(gateway, Detach("nobody"))
    await say(gateway, Attach("nobody", b"\xff" * 99))
    assert (await hear(gateway, Refused)).code is ErrorCode.UNKNOWN_STREAM
    for positions in ((), (-1,), (2**31 - 1,) * 9):
        await say(gateway, Heartbeat(Boot(9), streams=(StreamPosition("nobody", positions),)))
        assert (await hear(gateway, Refused)).code is ErrorCode.UNKNOWN_REQUEST
    await all_is_well(world, gateway, executor)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"age_s": NAN}, "age_s"),
        ({"sampling": SamplingParams(max_tokens=2**63)}, "max_tokens"),
        ({"sampling": SamplingParams(seed=2**64 - 1)}, "seed"),
        ({"sampling": SamplingParams(logprobs=-1)}, "logprobs"),
        ({"prompt_logprobs": (PositionLogprobs(NAN, 0),)}, "prompt_logprobs"),
        ({"priority": -(2**63)}, "priority"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_and_the_next_one_is_not(world, wrong, param):
    gateway, executor = await world.gateway(), await world.executor()
    await hear(gateway, Welcome)
    await say(gateway, replace(SUBMIT, request_id="wrong", **wrong))
    refusal = await hear(gateway, Refused)
    assert (refusal.request_id, refusal.param) == ("wrong", param)
    await all_is_well(world, gateway, executor)


async def test_messages_of_the_other_link_or_direction_are_dropped_and_counted(world):
    gateway, executor = await world.gateway(), await world.executor()
    before = dropped("request", "unknown"), dropped("step", "unknown")
    await say(gateway, Accepted("cmpl-1", 3))
    await say(gateway, StepResult(world.server.boot, 1, ()))
    await say(executor, SUBMIT)
    await until(
        lambda: (
            (dropped("request", "unknown"), dropped("step", "unknown"))
            == (before[0] + 2, before[1] + 1)
        )
    )
    await all_is_well(world, gateway, executor)


# ------------------------------------------------------------------ the step link


def nonsense(plan):
    """Results that decode, answer this plan, and are wrong about its one row, A."""
    boot, step_id, row = plan.boot, plan.step_id, plan.rows[0]
    mine, good = row.sequence_id, PositionLogprobs(-1.0, 1)
    scored = Scored(mine, 0, (good,) * 2)
    drawn = (Sampled(mine, 70, good),)
    return [
        StepResult(boot, step_id, ()),
        StepResult(boot, step_id, (Sampled(999_999, 70, good),), scored=(scored,)),
        StepResult(boot, step_id, (Sampled(mine, None, good),), scored=(scored,)),
        StepResult(boot, step_id, (Sampled(mine, 2**63, good),), scored=(scored,)),
        StepResult(boot, step_id, (Sampled(mine, 70),), scored=(scored,)),
        StepResult(
            boot, step_id, (Sampled(mine, 70, replace(good, chosen=NAN)),), scored=(scored,)
        ),
        StepResult(boot, step_id, drawn),
        StepResult(boot, step_id, drawn, scored=(replace(scored, sequence_id=2**63),)),
        StepResult(boot, step_id, drawn, scored=(replace(scored, first_position=-1),)),
        StepResult(boot, step_id, drawn, scored=(replace(scored, logprobs=(good,)),)),
        StepResult(boot, step_id, drawn, scored=(replace(scored, logprobs=(good,) * 999),)),
        StepResult(
            boot, step_id, drawn,
            scored=(replace(scored, logprobs=(good, replace(good, chosen=NAN))),),
        ),
        StepResult(boot, step_id, drawn, (RowError(mine, "no", ErrorCode.MOVED),), (scored,)),
        StepFailed(boot, step_id, "no"),
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(14))
async def test_a_result_that_is_wrong_about_a_request_ends_it_and_the_next_is_well(world, which):
    gateway, executor = await world.gateway(), await world.executor()
    wants = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    await say(gateway, replace(SUBMIT, sampling=wants))
    await say(executor, nonsense(await hear(executor, StepPlan))[which])
    finished = await hear(gateway, Finished)
    assert (finished.reason, finished.length) == ("error", 0)
    assert finished.error
    await say(gateway, Done(finished.request_id))
    await all_is_well(world, gateway, executor)


async def test_reports_on_rows_that_are_not_there_are_counted_and_the_rest_is_taken(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    lies = {
        "row_errors": (RowError(-5, "who?"),),
        "scored": (Scored(2**64 - 1, -7, (PositionLogprobs(NAN, -1, (-1,), (NAN, NAN)),)),),
    }
    sampled = (Sampled(plan.rows[0].sequence_id, 70), Sampled(0, 2**64 - 1), Sampled(1000, None))
    await say(executor, StepResult(plan.boot, plan.step_id, sampled, **lies))
    (run,) = (await hear(gateway, Tokens)).items
    assert run.token_ids == (70,)
    assert metric(world, "reports_ignored_total") == 4
    await run_plan(executor)
    await hear(gateway, Finished)
    await say(gateway, Done(SUBMIT.request_id))
    await all_is_well(world, gateway, executor)


async def test_results_of_no_plan_are_dropped_and_counted(world):
    gateway, executor = await world.gateway(), await world.executor()
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    drawn = (Sampled(plan.rows[0].sequence_id, 70),)
    for boot, step_id in ((1, plan.step_id), (plan.boot, -1), (plan.boot, plan.step_id + 1)):
        await say(executor, StepResult(boot, step_id, drawn))
        await say(executor, StepFailed(boot, step_id, "no"))
    await say(executor, StepResult(plan.boot, plan.step_id, drawn))
    await say(executor, StepResult(plan.boot, plan.step_id, drawn))  # once more
    assert (await hear(gateway, Tokens)).items[0].token_ids == (70,)
    await run_plan(executor, 71)
    assert (await hear(gateway, Finished)).length == 2
    assert metric(world, "results_dropped_total") == 7
    await say(gateway, Done(SUBMIT.request_id))
    await all_is_well(world, gateway, executor)


async def test_a_stranger_answers_for_nobody_and_is_counted(world):
    gateway, executor = await world.gateway(), await world.executor()
    stranger = world.peer("step", b"e6")
    await say(gateway, SUBMIT)
    plan = await hear(executor, StepPlan)
    before = dropped("step", "stranger")
    await say(stranger, StepResult(plan.boot, plan.step_id, ()))
    await say(stranger, StepFailed(plan.boot, plan.step_id, "no"))
    await until(lambda: dropped("step", "stranger") == before + 2)
    assert world.server.core.counters.plans_refused == 0
    await say(executor, StepResult(plan.boot, plan.step_id,
                                   (Sampled(plan.rows[0].sequence_id, 70),)))  # fmt: skip
    await run_plan(executor)
    await hear(gateway, Finished)


async def test_an_executor_that_claims_more_blocks_than_memory_holds_is_dropped_and_counted(world):
    before = dropped("step", "absurd")
    liar = world.peer("step", b"e7")
    await say(liar, replace(READY, boot=Boot(7), num_gpu_blocks=2**31 - 1))
    await until(lambda: dropped("step", "absurd") == before + 1)
    assert world.server.executor is None


async def test_gauges_show_the_queue_and_its_end(world):
    gateway = await world.gateway()
    await say(gateway, SUBMIT)
    await until(lambda: world.server.core.num_queued == 1)
    shown = {
        name: metric(world, name)
        for name in (
            "num_requests_waiting", "num_requests_queued", "num_tokens_queued",
            "max_num_queued_reqs", "max_num_queued_tokens",
        )
    }  # fmt: skip
    assert list(shown.values()) == [1, 1, 3, 4096, 4 * 2**20]
    executor = await world.executor()
    await hear(executor, StepPlan)
    assert (metric(world, "num_requests_queued"), metric(world, "num_requests_running")) == (0, 1)
