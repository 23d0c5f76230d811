"""Ready or not, and what becomes of requests meanwhile: the scheduler or its executor is away."""

import asyncio
from pathlib import Path

import pytest

from services.gateway.readiness import LinkTimes
from shared.messages import Activity, CancelReason, Heartbeat, Submit
from tests.gateway.house import House, held_stream, open_house, restart, text_of, until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler

PATH = "/v1/completions"
NO_EXECUTOR = "waiting for an executor"


async def until_phase(house: House, phase: str) -> None:
    """Until /health/ready is 503 and says so."""
    async with asyncio.timeout(5):
        while (told := await house.get("/health/ready"))[1].get("phase") != phase:
            await house.scheduler.until_next()
    assert told[0] == 503


async def beats(house: House, count: int) -> None:
    """Until so many more heartbeats have come."""
    seen = len(house.scheduler.of(Heartbeat))
    await house.scheduler.until(lambda: len(house.scheduler.of(Heartbeat)) >= seen + count)


# ------------------------------------------------------------------ no scheduler


async def test_without_a_scheduler_requests_are_503_and_readiness_says_why(tmp_path: Path) -> None:
    times = LinkTimes(beat_s=0.02, silent_s=0.1)
    async with open_house(tmp_path, times=times) as house:
        await house.scheduler.close()
        async with asyncio.timeout(5):
            while (await house.get("/health/ready"))[0] == 200:
                await asyncio.sleep(0.02)
        status, told = await house.get("/health/ready")
        assert (status, told["phase"]) == (503, "waiting for the scheduler")
        assert (await house.get("/health/live"))[0] == 200
        async with house.http.post(house.url + PATH, json={"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "service_unavailable"
        house.scheduler = ScriptedScheduler(house.endpoint)
        await until_ready(house)
        assert (await house.complete())["choices"][0]["text"] == "ok"


async def test_the_phase_is_the_schedulers_until_it_says_welcome(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        scheduler = await restart(house)
        scheduler.welcomes = False
        scheduler.phase = "loading weights 41 %"
        async with asyncio.timeout(5):
            while (told := await house.get("/health/ready"))[1].get("phase") != scheduler.phase:
                await scheduler.until_next()
        assert told[0] == 503
        scheduler.welcomes, scheduler.phase = True, ""
        await until_ready(house)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"model": "smollm2"}, "--model toy"), ({"vocab": 100}, "258 tokens")],
)
async def test_another_model_than_the_tokenizers_is_not_ready(tmp_path, options, said) -> None:
    async with open_house(tmp_path) as house:
        scheduler = await restart(house, **options)
        async with asyncio.timeout(5):
            while said not in (await house.get("/health/ready"))[1].get("phase", ""):
                await scheduler.until_next()
        status, told = await house.post(PATH, prompt="x")
        assert status == 503
        assert said in told["error"]["message"]
        assert "try again" not in told["error"]["message"], "waiting does not help"


# ------------------------------------------------------------------ a scheduler without executor


async def test_without_an_executor_it_is_not_ready_but_requests_queue(house: House) -> None:
    house.scheduler.holds = True
    house.scheduler.phase = NO_EXECUTOR
    await until_phase(house, NO_EXECUTOR)
    assert (await house.get("/health"))[0] == 503
    assert (await house.get("/health/live"))[0] == 200
    asking = asyncio.create_task(house.complete())
    submit = await house.scheduler.submitted()
    house.scheduler.phase = ""
    await until_ready(house)
    house.scheduler.run(submit.request_id, "late")
    house.scheduler.finish(submit.request_id)
    assert (await asking)["choices"][0]["text"] == "late"


async def test_what_waited_too_long_for_an_executor_ends_and_new_requests_are_503(
    tmp_path: Path,
) -> None:
    """Though the scheduler answers, and welcomes, all the time."""
    times = LinkTimes(beat_s=0.02, silent_s=30.0, lost_s=0.5)
    async with open_house(tmp_path, times=times) as house, held_stream(house) as held:
        held.run("ab")
        assert text_of([await held.events.next()]) == "ab"
        asking = asyncio.create_task(house.http.post(house.url + PATH, json={"prompt": "x"}))
        plain = await house.scheduler.submitted(2)
        house.scheduler.phase = NO_EXECUTOR
        told = await held.events.rest()
        assert told[-2]["error"]["code"] == "service_unavailable"
        assert NO_EXECUTOR in told[-2]["error"]["message"]
        assert told[-1] == "[DONE]"
        for answer in (
            await asking,
            await house.http.post(house.url + PATH, json={"prompt": "x"}),
        ):
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "service_unavailable"
        assert (await house.get("/health/live"))[0] == 200
        assert len(house.scheduler.of(Submit)) == 2, "the third was not even sent"
        gone = CancelReason.CLIENT_GONE
        await house.scheduler.until(lambda: len(house.scheduler.cancels(gone)) == 2)
        assert set(house.scheduler.cancels(gone)) == {held.request_id, plain.request_id}
        house.scheduler.phase, house.scheduler.holds = "", False
        await until_ready(house)
        assert (await house.complete())["choices"][0]["text"] == "ok"


async def test_a_stream_goes_on_when_the_executor_comes_back_in_time(tmp_path: Path) -> None:
    """And the time without one is not counted for ever."""
    times = LinkTimes(beat_s=0.02, silent_s=30.0, lost_s=1.0)
    async with open_house(tmp_path, times=times) as house, held_stream(house) as held:
        for run in ("ab", "cd"):
            house.scheduler.phase = NO_EXECUTOR
            await until_phase(house, NO_EXECUTOR)
            house.scheduler.phase = ""
            await until_ready(house)
            await beats(house, 60)
            held.run(run)
            assert text_of([await held.events.next()]) == run
        held.finish()
        assert (await held.events.rest())[-1] == "[DONE]"


# ------------------------------------------------------------------ what it is doing


@pytest.mark.parametrize("activity", [Activity.IDLE, Activity.BUSY])
async def test_one_that_is_ready_says_whether_there_is_work(house: House, activity) -> None:
    house.scheduler.activity = activity
    await beats(house, 2)
    assert await house.get("/health") == (200, {"status": activity.value})


async def test_a_step_that_never_comes_back_shows(house: House) -> None:
    house.scheduler.activity = Activity.STALLED
    await beats(house, 2)
    status, told = await house.get("/health")
    assert (status, told["status"]) == (503, "stalled")
    assert "executor" in told["phase"]
    assert (await house.complete())["choices"], "requests are taken all the same"


async def test_loading_and_draining_are_told_apart(house: House) -> None:
    house.scheduler.phase = NO_EXECUTOR
    await until_phase(house, NO_EXECUTOR)
    assert (await house.get("/health"))[1] == {"status": "loading", "phase": NO_EXECUTOR}
    house.scheduler.phase = ""
    await until_ready(house)
    async with held_stream(house) as held:
        await house.get("/health")  # leaves a connection that is kept alive
        draining = asyncio.create_task(house.gateway.drain())
        await until_phase(house, "draining")
        assert (await house.get("/health"))[1]["status"] == "draining"
        held.finish()
        await held.events.rest()
    await draining
