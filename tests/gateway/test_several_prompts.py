"""One call with several prompts: a request each at the scheduler, one answer for the client."""

import asyncio
from typing import Any

import pytest

from shared.errors import ErrorCode
from shared.messages import CancelReason, Done, Heartbeat, Refused, Submit
from shared.sampling import FinishReason
from tests.gateway.house import PATIENT, House, open_house, restart, text_of, usage
from tests.gateway.scripted_scheduler import Script

PATH = "/v1/completions"
FULL = Refused("", ErrorCode.QUEUE_FULL, "4096 requests wait already", None, 2.0)


def texts_of(events: list[Any], count: int) -> list[str]:
    """The text of each choice of a stream."""
    texts = [""] * count
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else []:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_each_prompt_is_a_request_and_a_choice(house: House) -> None:
    house.scheduler.script.extend([Script(["one"]), Script(["twelve"]), Script(["3"])])
    answer = await house.complete(prompt=[[97], [98, 98], [99, 99, 99]])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == ["one", "twelve", "3"]
    assert answer["usage"] == usage(6, 10)
    submits = house.scheduler.of(Submit)
    assert [bytes(submit.prompt) for submit in submits] == [b"a", b"bb", b"ccc"]
    first = answer["id"]
    assert [submit.request_id for submit in submits] == [first, first + "-1", first + "-2"]
    await house.scheduler.until(lambda: len(house.scheduler.of(Done)) == 3)
    assert house.gateway.link.num_open == 0


async def test_one_stream_tells_them_all_as_they_come(house: House) -> None:
    house.scheduler.holds = True
    fields = {"prompt": ["a", "b"], "stream_options": {"include_usage": True}}
    async with house.stream(PATH, **fields) as events:
        await house.scheduler.submitted(2)
        one, two = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.run(two, "zwei")
        told: list[Any] = [await events.next()]
        assert (told[0]["choices"][0]["index"], told[0]["choices"][0]["text"]) == (1, "zwei")
        house.scheduler.run(one, "eins")
        house.scheduler.finish(one)
        told += [await events.next(), await events.next()]
        assert told[-1]["choices"][0]["finish_reason"] == "length"
        house.scheduler.run(two, "!")
        house.scheduler.finish(two)
        told += await events.rest()
    assert texts_of(told[:-1], 2) == ["eins", "zwei!"]
    assert told[-2]["usage"] == usage(2, 9)
    assert told[-1] == "[DONE]"


async def test_an_echo_opens_each_choice(house: House) -> None:
    async with house.stream(PATH, prompt=["a", "b"], echo=True) as events:
        told = await events.rest()
    assert [event["choices"][0]["text"] for event in told[:2]] == ["a", "b"]
    assert texts_of(told[:-1], 2) == ["aok", "bok"]


@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_is_refused_ends_them_all_and_leaves_nothing(house, stream) -> None:
    """The error is a status, also for a stream: all are taken before its first byte."""
    house.scheduler.holds = True
    house.scheduler.script.extend([Script(), Script(), Script(refusal=FULL), Script()])
    status, told = await house.post(PATH, prompt=["a", "b", "c", "d"], stream=stream)
    assert (status, told["error"]["code"]) == (429, "queue_full")
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: len(house.scheduler.cancels(gone)) == 3)
    submits = [submit.request_id for submit in house.scheduler.of(Submit)]
    assert set(house.scheduler.cancels(gone)) == {submits[0], submits[1], submits[3]}
    assert house.scheduler.logs == {}
    assert house.gateway.link.num_open == 0


async def test_the_prompt_that_is_to_blame_is_named(house: House) -> None:
    too_long = Refused("", ErrorCode.CONTEXT_LENGTH, "prompt has 9 tokens; fewer fit", "prompt")
    house.scheduler.script.extend([Script(), Script(refusal=too_long)])
    status, told = await house.post(PATH, prompt=["a", "b"])
    assert (status, told["error"]["param"]) == (400, "prompt[1]")
    assert told["error"]["message"] == "prompt[1]: prompt has 9 tokens; fewer fit"


async def test_no_byte_goes_out_before_all_are_taken(house: House) -> None:
    house.scheduler.is_mute = True
    asking = asyncio.create_task(house.http.post(house.url + PATH, json=stream_of(["a", "b"])))
    await house.scheduler.submitted(2)
    one, two = house.scheduler.of(Submit)
    house.scheduler.holds = True
    house.scheduler.take(one)
    beats = len(house.scheduler.of(Heartbeat))
    await house.scheduler.until(lambda: len(house.scheduler.of(Heartbeat)) > beats + 2)
    assert not asking.done()
    house.scheduler.take(two)
    async with await asking as response:
        assert response.status == 200


def stream_of(prompts: list[str]) -> dict[str, Any]:
    return {"prompt": prompts, "stream": True}


async def test_one_that_fails_ends_the_stream_with_one_error(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["a", "b", "c"]) as events:
        await house.scheduler.submitted(3)
        one, two, three = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.run(one, "delivered")
        assert text_of([await events.next()]) == "delivered"
        house.scheduler.run(two, "x")
        house.scheduler.finish(two, FinishReason.ERROR, error="NaN logits")
        told = await events.rest()
    assert told[-1] == "[DONE]"
    assert [event for event in told if "error" in event] == [told[-2]]
    assert told[-2]["error"]["message"] == "NaN logits"
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: len(house.scheduler.cancels(gone)) == 2)
    assert set(house.scheduler.cancels(gone)) == {one, three}


async def test_a_client_that_leaves_cancels_them_all(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["a", "b", "c"]) as events:
        await house.scheduler.submitted(3)
        events.response.close()
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: len(house.scheduler.cancels(gone)) == 3)
    assert house.gateway.link.num_open == 0


async def test_all_of_them_go_on_with_the_next_scheduler(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["a", "b"]) as events:
        await house.scheduler.submitted(2)
        one, two = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.run(one, "12")
        told = [await events.next()]
        scheduler = await restart(house)
        await scheduler.submitted(2)
        for request_id, run in ((one, "34"), (two, "xyz")):
            scheduler.run(request_id, run)
            scheduler.finish(request_id)
        told += await events.rest()
    assert texts_of(told[:-1], 2) == ["1234", "xyz"]


async def test_stop_strings_cancel_only_their_own(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(prompt=["a", "b"], stop=["."]))
    await house.scheduler.submitted(2)
    one, two = [submit.request_id for submit in house.scheduler.of(Submit)]
    house.scheduler.run(two, "end.more")
    await house.scheduler.until(lambda: house.scheduler.cancels(CancelReason.STOP_STRING) == [two])
    house.scheduler.run(one, "open")
    house.scheduler.finish(one)
    answer = await asking
    assert [(c["text"], c["stop_reason"]) for c in answer["choices"]] == [
        ("open", None),
        ("end", "."),
    ]
    assert answer["usage"]["completion_tokens"] == 8


async def test_prompts_that_are_alike_draw_apart_unless_they_are_seeded(house: House) -> None:
    await house.complete(prompt=["a", "a", "a"])
    await house.complete(prompt=["a", "a"], seed=7)
    *drawn, one, two = [submit.sampling.seed for submit in house.scheduler.of(Submit)]
    assert len(set(drawn)) == 3
    assert (one, two) == (7, 7)


@pytest.mark.parametrize(("count", "has_ids"), [(128, True), (129, False)])
async def test_ids_of_very_many_choices_are_left_out(house, count, has_ids) -> None:
    """They would be most of the bytes."""
    async with house.stream(PATH, prompt=["a"] * count) as events:
        assert await events.frame() == [": ping"]
        lines = await events.frame()
        assert any(line.startswith("id: ") for line in lines) == has_ids
        assert len(await events.rest()) == 2 * count


async def test_a_thousand_prompts(tmp_path) -> None:
    """Each is answered with its own number; the stream is whole."""
    prompts = [f"<{number}>" for number in range(1024)]
    async with open_house(tmp_path, times=PATIENT) as house:
        house.scheduler.answer = lambda submit: bytes(submit.prompt) * 3
        async with house.stream(PATH, prompt=prompts, max_tokens=100) as events:
            told = await events.rest()
        await house.scheduler.until(lambda: not house.scheduler.logs, 60)
    assert texts_of(told[:-1], 1024) == [prompt * 3 for prompt in prompts]
    ends = [e["choices"][0]["index"] for e in told[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(1024))
