"""Priorities and deadlines on their way to the scheduler, and what ends when nobody answers."""

import asyncio
import time
from typing import Any

import openai
import pytest
import structlog

from services.gateway import answer_group
from services.gateway.answer_group import AnswerGroup, Deadline, StreamRefused
from services.gateway.link import SchedulerLink
from shared.errors import ErrorCode
from shared.ids import RequestId
from shared.messages import Cancel, CancelReason, Refused, Submit
from shared.sampling import FinishReason, SamplingParams
from tests.gateway.house import House, open_house, restart, text_of
from tests.gateway.scripted_scheduler import Script

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BOTH = [(PATH, {"prompt": "Hi"}), (CHAT_PATH, CHAT)]
SOON = 0.3


def cancelled(house: House) -> bool:
    return bool(house.scheduler.cancels(CancelReason.CLIENT_GONE))


# ------------------------------------------------------------------ what the scheduler hears


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_both_fields_reach_the_scheduler(house: House, path, fields) -> None:
    await house.post(path, **fields, priority=-(2**31), deadline_s=86_400)
    submit = house.scheduler.of(Submit)[0]
    assert (submit.priority, submit.deadline_s) == (-(2**31), 86_400.0)
    await house.post(path, **fields)
    submit = house.scheduler.of(Submit)[1]
    assert (submit.priority, submit.deadline_s) == (0, None)


async def test_the_time_that_prompts_take_to_read_counts(house: House) -> None:
    arrived = time.monotonic()
    await house.complete(prompt=["x" * 8000] * 50, deadline_s=60, max_tokens=1)
    ages = [submit.age_s for submit in house.scheduler.of(Submit)]
    assert ages == sorted(ages)
    assert 0 < ages[0] < ages[-1] < time.monotonic() - arrived


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_priority_is_a_bad_field(house: House, stream) -> None:
    why = "priority: is 3; this server serves whoever comes first (--scheduling-policy priority)"
    house.scheduler.script.append(Script(refusal=Refused("", ErrorCode.INVALID, why, "priority")))
    status, told = await house.post(PATH, prompt="Hi", priority=3, stream=stream)
    assert (status, told["error"]["param"]) == (400, "priority")
    assert "--scheduling-policy" in told["error"]["message"]


# ------------------------------------------------------------------ the scheduler's word


@pytest.mark.parametrize("stream", [True, False])
async def test_refused_for_its_deadline_before_the_first_byte_is_408(house: House, stream) -> None:
    why = "deadline_s of 1 s passed after 0 tokens"
    house.scheduler.script.append(Script(refusal=Refused("", ErrorCode.DEADLINE, why)))
    body = {"prompt": "Hi", "deadline_s": 1, "stream": stream}
    async with house.http.post(house.url + PATH, json=body) as response:
        told = (await response.json())["error"]
    assert (response.status, told["code"], told["message"]) == (408, "deadline_exceeded", why)
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("early", ["", "some tokens"])
async def test_ended_by_its_deadline_a_stream_has_an_error_event(house: House, early) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", deadline_s=60) as events:
        request_id = (await house.scheduler.submitted()).request_id
        if early:
            house.scheduler.run(request_id, early)
            assert text_of([await events.next()]) == early
        why = "deadline_s of 60 s passed after 3 tokens"
        house.scheduler.finish(request_id, FinishReason.ERROR, error=why, code=ErrorCode.DEADLINE)
        event, end = await events.rest()
    assert event["error"] == {
        "message": why, "type": "invalid_request_error", "param": None, "code": "deadline_exceeded",
    }  # fmt: skip
    assert end == "[DONE]"


async def test_the_log_of_a_stream_says_which_error_ended_it(house: House) -> None:
    house.scheduler.holds = True
    with structlog.testing.capture_logs() as logged:
        async with house.stream(PATH, prompt="Hi", n=2, deadline_s=60) as events:
            request_id = (await house.scheduler.submitted()).request_id
            house.scheduler.run(request_id, "some")
            house.scheduler.finish(request_id)
            house.scheduler.finish(
                request_id, FinishReason.ERROR, 1, error="late", code=ErrorCode.DEADLINE
            )
            await events.rest()
        house.scheduler.holds = False
        await house.complete()  # on the same connection: the line before is written
    line = next(one for one in logged if one["event"] == "request_finished")
    assert (line["status"], line["code"]) == (200, "deadline_exceeded")
    assert line["finish"] == "length,error"


async def test_the_official_client_does_not_ask_again(house: House) -> None:
    no = Refused("", ErrorCode.DEADLINE, "deadline_s of 1 s passed after 0 tokens")
    house.scheduler.script.extend([Script(refusal=no)] * 3)
    async with openai.AsyncOpenAI(
        base_url=house.url + "/v1", api_key="none", max_retries=2
    ) as client:
        with pytest.raises(openai.APIStatusError) as late:
            await client.completions.create(
                model="toy", prompt="Hi", extra_body={"deadline_s": 1, "priority": 0}
            )
    assert (late.value.status_code, late.value.code) == (408, "deadline_exceeded")
    assert len(house.scheduler.of(Submit)) == 1


# ------------------------------------------------------------------ nobody's word


@pytest.mark.parametrize("stream", [True, False])
async def test_a_scheduler_that_is_lost_does_not_hold_up_a_deadline(tmp_path, stream) -> None:
    """It had not even taken the request."""
    async with open_house(tmp_path) as house:
        house.scheduler.is_mute = True
        asking = asyncio.create_task(house.post(PATH, prompt="Hi", deadline_s=SOON, stream=stream))
        await house.scheduler.submitted()
        await house.scheduler.close()
        status, told = await asking
    assert (status, told["error"]["code"]) == (408, "deadline_exceeded")
    assert told["error"]["message"].startswith("deadline_s of 0.3 s passed")


async def test_a_stream_that_waits_for_a_scheduler_ends_at_its_deadline(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", deadline_s=SOON) as events:
        request_id = (await house.scheduler.submitted()).request_id
        house.scheduler.run(request_id, "some")
        assert text_of([await events.next()]) == "some"
        await house.scheduler.close()
        event, end = await events.rest()
    assert (event["error"]["code"], end) == ("deadline_exceeded", "[DONE]")
    assert house.gateway.link.num_open == 0


async def test_a_scheduler_that_never_strikes_is_helped_and_told(house: House) -> None:
    """It answers beats and nothing else: after a moment of grace the gateway strikes."""
    house.scheduler.holds = True
    began = time.monotonic()
    status, told = await house.post(PATH, prompt=["a", "b"], deadline_s=SOON)
    assert (status, told["error"]["code"]) == (408, "deadline_exceeded")
    assert time.monotonic() - began >= SOON + answer_group._GRACE_S
    ids = {submit.request_id for submit in house.scheduler.of(Submit)}
    await house.scheduler.until(
        lambda: set(house.scheduler.cancels(CancelReason.CLIENT_GONE)) == ids
    )


async def test_a_deadline_strikes_though_the_executor_is_gone(house: House) -> None:
    house.scheduler.holds = True
    house.scheduler.phase = "waiting for an executor"
    await house.scheduler.until_next()
    status, told = await house.post(PATH, prompt="Hi", deadline_s=SOON)
    assert (status, told["error"]["code"]) == (408, "deadline_exceeded")
    assert "waiting for an executor" in told["error"]["message"]
    await house.scheduler.until(lambda: cancelled(house))


async def test_a_deadline_that_passed_before_the_prompt_was_read_submits_nothing(house) -> None:
    status, told = await house.post(PATH, prompt="x" * 4000, deadline_s=1e-9)
    assert (status, told["error"]["code"]) == (408, "deadline_exceeded")
    assert "before the prompt was read" in told["error"]["message"]
    assert house.scheduler.of(Submit) == []


async def test_an_answer_in_time_is_whole(house: House) -> None:
    for fields in ({"n": 2}, {"prompt": ["a", "b"]}, {"use_beam_search": True, "n": 2}):
        answer = await house.complete(**{"deadline_s": 60, **fields})
        assert len(answer["choices"]) == 2
    assert house.scheduler.of(Cancel) == []


async def test_the_next_scheduler_hears_how_old_a_request_is(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", deadline_s=60, priority=2) as events:
        first = await house.scheduler.submitted()
        scheduler = await restart(house)
        again = await scheduler.submitted()
        assert (again.deadline_s, again.priority) == (60.0, 2)
        assert again.age_s > first.age_s
        scheduler.run(again.request_id, "late")
        scheduler.finish(again.request_id)
        assert text_of(await events.rest()) == "late"


async def test_a_scheduler_that_comes_back_just_then_is_given_its_moment(tmp_path) -> None:
    """The wait ends at the deadline, for none was heard; by then one is."""
    link = SchedulerLink(f"ipc://{tmp_path}/r", "toy", 512)
    try:
        now = time.monotonic()
        group = AnswerGroup(link, Deadline(now - 5, 5.0))
        submit = Submit(RequestId("a"), (1,), SamplingParams(), deadline_s=5.0)
        group.submit(submit)
        link.scheduler.boot = 1
        link.scheduler.heard()
        group._give_up()
        assert not group.streams[0].is_refused
        link.scheduler.boot = None
        with pytest.raises(StreamRefused, match="deadline_s of 5 s passed"):
            await group.next()
    finally:
        link.close()
