"""Streams that are cut off, kept, and gone on with: all of it over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.stream_context import NotUnderstood, unpacked
from shared.errors import ErrorCode
from shared.messages import Attach, Cancel, CancelReason, Detach, Done, Hello, Refused, Submit
from tests.gateway.cut_streams import KEPT, PATH, id_of_next, left, refused, resumed
from tests.gateway.house import (
    Events,
    House,
    held_stream,
    narrow,
    open_gateway,
    open_house,
    restart,
    text_of,
)

# ------------------------------------------------------------------ leaving


async def test_a_client_that_may_come_back_is_not_cancelled(house: House) -> None:
    before = await house.metric('streams_detached_total{reason="client_gone"}')
    submit, _ = await left(house)
    assert house.scheduler.detached == {submit.request_id: False}
    assert house.scheduler.of(Cancel) == []
    assert house.gateway.link.num_open == 0
    assert await house.metric('streams_detached_total{reason="client_gone"}') == before + 1


async def test_one_that_was_told_all_is_kept_in_case_the_last_of_it_was_lost(house: House) -> None:
    house.scheduler.holds = False
    async with house.stream(PATH, prompt="Hi", **KEPT) as events:
        assert text_of(await events.rest()) == "ok"
    await house.scheduler.until(lambda: bool(house.scheduler.detached))
    (request_id,) = house.scheduler.detached
    assert house.scheduler.detached[request_id]
    async with resumed(house, request_id) as events:
        assert text_of(await events.rest()) == "ok"


async def test_without_the_option_a_whole_stream_is_over(house: House) -> None:
    async with house.stream(PATH, prompt="Hi") as events:
        await events.rest()
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))
    assert house.scheduler.of(Detach) == []


async def test_late_tokens_of_a_detached_stream_do_not_end_it(house: House) -> None:
    submit, last = await left(house)
    house.scheduler.run(submit.request_id, "de")
    await house.scheduler.until(lambda: bool(house.scheduler.of(Cancel)))  # of no account there
    async with resumed(house, submit.request_id, last) as events:
        assert text_of([await events.next()]) == "de"


# ------------------------------------------------------------------ coming back


@pytest.mark.parametrize("how", ["get", "post", "post the same"])
async def test_a_stream_goes_on_behind_its_last_event(house: House, how: str) -> None:
    submit, last = await left(house)
    attached = await house.metric("streams_attached_total")
    house.scheduler.logs[submit.request_id][0].token_ids += b"de"
    url, headers = house.url + PATH, {"Last-Event-ID": last}
    if how == "get":
        opening = resumed(house, submit.request_id, last)
    elif how == "post":
        opening = as_events(house.http.post(url, headers=headers))
    else:
        body = {"prompt": "Hi", "stream": True, **KEPT}
        opening = as_events(house.http.post(url, headers=headers, json=body))
    async with opening as events:
        assert text_of([await events.next()]) == "de"
        house.scheduler.run(submit.request_id, "f")
        house.scheduler.finish(submit.request_id)
        told = await events.rest()
    assert text_of(told) == "f"
    assert told[-1] == "[DONE]"
    assert told[0]["id"] == submit.request_id
    assert await house.metric("streams_attached_total") == attached + 1
    assert len(house.scheduler.of(Submit)) == 1


@asynccontextmanager
async def as_events(asking: Any) -> AsyncIterator[Events]:
    async with asking as response:
        assert response.status == 200, await response.text()
        yield Events(response)


async def test_without_a_last_event_all_of_it_is_told_again(house: House) -> None:
    submit, _ = await left(house)
    house.scheduler.finish(submit.request_id)
    async with resumed(house, submit.request_id) as events:
        assert await events.frame() == ["retry: 1000"]
        told = await events.rest()
    assert text_of(told) == "abc"
    assert told[-1] == "[DONE]"


async def test_whoever_was_told_all_hears_that_it_is_over(house: House) -> None:
    usage = {"stream_options": {"resumable": True, "include_usage": True}}
    house.scheduler.holds = False
    async with house.stream(PATH, prompt="Hi", **usage) as events:
        ids = []
        with suppress(AssertionError):
            while True:
                ids.append(await id_of_next(events))
    assert ids[-1].endswith(":done")
    request_id = ids[-1].partition(":")[0]
    async with resumed(house, request_id, ids[-1]) as events:
        assert await events.rest() == ["[DONE]"]
    async with resumed(house, request_id, ids[-2]) as events:
        told = await events.rest()
    assert [chunk["choices"] for chunk in told[:-1]] == [[]]


async def test_all_of_a_chat_is_as_it_was(house: House) -> None:
    house.scheduler.holds = True
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stop": ["stop"], "n": 2}
    options = {"resumable": True, "include_usage": True, "continuous_usage_stats": True}
    path = "/v1/chat/completions"
    async with house.stream(path, **chat, stream_options=options, return_token_ids=True) as events:
        submit = await house.scheduler.submitted()
        first = [await events.next(), await events.next()]
        house.scheduler.run(submit.request_id, "one st", 0)
        first.append(await events.next())
        house.scheduler.run(submit.request_id, "two", 1)
        last = await id_of_next(events)
        assert last.endswith(":6.3")
        events.response.close()
    await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)
    house.scheduler.run(submit.request_id, "op and on", 0)
    async with resumed(house, submit.request_id, last) as events:
        told = [await events.next()]
        house.scheduler.run(submit.request_id, "!", 1)
        house.scheduler.finish(submit.request_id, index=1)
        told += await events.rest()
    assert told[0]["created"] == first[0]["created"]
    assert told[0]["object"] == "chat.completion.chunk"
    choices = [c for chunk in told[:-2] for c in chunk["choices"]]
    assert [(c["index"], c["delta"], c["finish_reason"]) for c in choices] == [
        (0, {}, "stop"), (1, {"content": "!"}, None), (1, {}, "length")
    ]  # fmt: skip
    assert choices[0]["stop_reason"] == "stop"
    assert told[-2]["usage"]["completion_tokens"] == 8 + 4
    assert told[0]["usage"]["completion_tokens"] == 8 + 3
    await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.STOP_STRING)))


async def test_log_probabilities_and_a_repeated_prompt_are_as_they_were(house: House) -> None:
    wish = {"prompt": "Hi", "echo": True, "logprobs": 2, "seed": 5}
    house.scheduler.holds = False
    whole = (await house.complete(**wish))["choices"][0]
    house.scheduler.holds = True
    async with held_stream(house, **wish, **KEPT) as held:
        held.run("o")
        first = await held.events.next()
        last = await id_of_next(held.events)
        held.events.response.close()
    await house.scheduler.until(lambda: held.request_id in house.scheduler.detached)
    held.run("k", lost=True)
    held.finish(lost=True)
    async with resumed(house, held.request_id, last) as events:
        told = await events.rest()
    assert text_of(told) == "k"
    assert told[0]["choices"][0]["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"][-1:]
    assert text_of([first]) == "Hi"


async def test_a_call_of_several_prompts_is_taken_over_whole(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["A", "B", "C"], **KEPT) as events:
        await house.scheduler.submitted(3)
        ids = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.run(ids[1], "bb")
        last = await id_of_next(events)
        events.response.close()
    await house.scheduler.until(lambda: len(house.scheduler.detached) == 3)
    for request_id in ids:
        house.scheduler.run(request_id, "z", lost=True)
        house.scheduler.finish(request_id, lost=True)
    async with resumed(house, ids[0], last) as events:
        told = await events.rest()
    texts = {c["index"]: c["text"] for chunk in told[:-1] for c in chunk["choices"] if c["text"]}
    assert texts == {0: "z", 1: "z", 2: "z"}
    assert [attach.request_id for attach in house.scheduler.of(Attach)] == ids
    status, code, message = await refused(house, "GET", f"/v1/streams/{ids[1]}")
    assert (status, code) == (404, "stream_not_found"), message


async def test_if_a_part_of_a_call_is_gone_the_rest_is_left_for_others(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["A", "B"], **KEPT) as events:
        await house.scheduler.submitted(2)
        ids = [submit.request_id for submit in house.scheduler.of(Submit)]
        events.response.close()
    await house.scheduler.until(lambda: len(house.scheduler.detached) == 2)
    del house.scheduler.logs[ids[1]]
    assert (await refused(house, "GET", f"/v1/streams/{ids[0]}"))[0] == 404
    await house.scheduler.until(lambda: ids[0] in house.scheduler.detached)
    assert house.gateway.link.num_open == 0


async def test_a_stream_that_was_taken_over_survives_the_scheduler(house: House) -> None:
    submit, last = await left(house, stop=["never"], seed=11, logit_bias={"65": 1})
    async with resumed(house, submit.request_id, last) as events:
        await house.scheduler.until(lambda: bool(house.scheduler.of(Attach)))
        await events.frame()
        await restart(house)
        again = await house.scheduler.submitted()
        assert (again.sampling, again.context) == (submit.sampling, submit.context)
        assert again.generated[0].token_ids == tuple(b"abc")
        assert again.resubmitted
        house.scheduler.run(submit.request_id, "de")
        house.scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "de"


async def test_one_that_leaves_again_is_kept_again(house: House) -> None:
    submit, last = await left(house)
    async with resumed(house, submit.request_id, last) as events:
        await events.frame()
        assert house.scheduler.detached == {}
        events.response.close()
    await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)


async def test_whoever_leaves_while_it_asks_for_a_stream_takes_nothing_along(house: House) -> None:
    submit, last = await left(house)
    house.scheduler.is_mute = True
    url = f"{house.url}/v1/streams/{submit.request_id}"
    asking = asyncio.create_task(house.http.get(url, headers={"Last-Event-ID": last}))
    await house.scheduler.until(lambda: bool(house.scheduler.of(Attach)))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    house.scheduler.is_mute = False
    async with asyncio.timeout(5):
        while await house.metric('http_requests_total{path="/v1/streams/{id}",status="499"}') < 1:
            await house.scheduler.until_next()
    house.scheduler.detached.clear()
    house.scheduler._give(house.scheduler.of(Attach)[0])
    await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)


# ------------------------------------------------------------------ lost with its scheduler


@pytest.mark.parametrize("seed", [None, 5])
async def test_a_stream_whose_scheduler_is_gone_is_begun_again_by_who_says_what_it_was(
    house: House, seed: int | None
) -> None:
    submit, last = await left(house, seed=seed)
    assert submit.sampling.seed == 5 or seed is None
    await restart(house)
    await house.scheduler.submitted_nothing()
    status = await refused(house, "GET", f"/v1/streams/{submit.request_id}")
    assert status[:2] == (404, "stream_not_found")
    body = {"prompt": "Hi", "stream": True, "seed": seed, **KEPT}
    asking = house.http.post(house.url + PATH, headers={"Last-Event-ID": last}, json=body)
    async with as_events(asking) as events:
        again = await house.scheduler.submitted()
        assert (again.request_id, again.sampling) == (submit.request_id, submit.sampling)
        assert (again.generated, again.resubmitted) == ((), False)
        house.scheduler.run(submit.request_id, "abcde")
        house.scheduler.finish(submit.request_id)
        told = await events.rest()
    assert (text_of(told), told[-1]) == ("de", "[DONE]")


async def test_a_new_scheduler_may_answer_before_it_says_that_it_is_new(house: House) -> None:
    """Not "no such stream", by which a client gives up: the stream is begun again."""
    submit, last = await left(house)
    await restart(house)
    scheduler = house.scheduler
    scheduler.beats = scheduler.welcomes = False
    body = {"prompt": "Hi", "stream": True, **KEPT}
    asking = asyncio.create_task(
        house.http.post(house.url + PATH, headers={"Last-Event-ID": last}, json=body)
    )
    await scheduler.until(lambda: bool(scheduler.of(Attach)))
    await scheduler.until_next()  # by then it has said that there is no such stream
    assert not asking.done()
    scheduler.welcomes, num_hellos = True, len(scheduler.of(Hello))
    await scheduler.until(lambda: len(scheduler.of(Hello)) > num_hellos)
    scheduler.beats = True
    assert (await scheduler.submitted()).request_id == submit.request_id
    scheduler.run(submit.request_id, "abcde")
    scheduler.finish(submit.request_id)
    async with await asking as response:
        assert text_of(await Events(response).rest()) == "de"


async def test_what_is_not_the_request_of_the_stream_does_not_begin_it(house: House) -> None:
    submit, last = await left(house)
    await restart(house)
    await house.scheduler.submitted_nothing()
    url, headers = house.url + PATH, {"Last-Event-ID": last}
    for body, says in (
        ({"prompt": "Hi"}, "set stream to true"),
        ({"prompt": "Hi", "stream": True, "n": 2}, "this stream has 2"),
        ({"prompt": 5, "stream": True}, "prompt"),
    ):
        async with house.http.post(url, headers=headers, json=body) as response:
            assert response.status == 400
            assert says in (await response.json())["error"]["message"]
    assert house.scheduler.of(Submit) == []
    assert submit.request_id not in house.scheduler.logs


async def test_a_known_request_is_not_begun_again_under_another_key(tmp_path: Path) -> None:
    """Whoever knows the id of a stranger's open stream hears nothing of it, and does no harm."""
    async with open_house(tmp_path, api_key=("sk-a", "sk-b")) as house:
        house.scheduler.holds = True
        as_a, as_b = ({"Authorization": f"Bearer sk-{name}"} for name in "ab")
        body = {"prompt": "Hi", "stream": True}
        async with house.http.post(house.url + PATH, json=body, headers=as_a) as response:
            events = Events(response)
            submit = await house.scheduler.submitted()
            house.scheduler.run(submit.request_id, "secret")
            last = await id_of_next(events)
            house.scheduler = await restart(house)
            await house.scheduler.submitted()
            headers = {**as_b, "Last-Event-ID": last}
            async with house.http.post(house.url + PATH, json=body, headers=headers) as stranger:
                told = await stranger.json()
            assert (stranger.status, told["error"]["param"]) == (400, "Last-Event-ID")
            house.scheduler.run(submit.request_id, "s")
            house.scheduler.finish(submit.request_id)
            assert text_of(await events.rest()) == "s"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("x", "'x' is no id of an event of this server"),
        ("cmpl-0:1", "is one of cmpl-0, not of this stream"),
        ("{id}:1.2", "speaks of 2 choices; this stream has 1"),
    ],
)
async def test_a_last_event_that_cannot_be_is_refused(house: House, last, message) -> None:
    submit, _ = await left(house)
    path, last = f"/v1/streams/{submit.request_id}", last.format(id=submit.request_id)
    told = await refused(house, "GET", path, **{"Last-Event-ID": last})
    assert told == (400, "invalid_value", f"Last-Event-ID: {message}")
    await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)


async def test_a_post_is_for_streams_of_its_own_kind(house: House) -> None:
    submit, last = await left(house)
    told = await refused(house, "POST", "/v1/chat/completions", **{"Last-Event-ID": last})
    assert told[:2] == (400, "invalid_value")
    told = await refused(house, "POST", PATH, **{"Last-Event-ID": "cmpl-77:3"})
    assert told[:2] == (404, "stream_not_found")
    assert submit.request_id in house.scheduler.detached


@pytest.mark.parametrize("request_id", ["cmpl-77", "x", "cmpl-77-1", "prefix-1", "%00"])
async def test_what_is_not_kept_is_not_found(house: House, request_id: str) -> None:
    told = await refused(house, "GET", f"/v1/streams/{request_id}")
    assert told[:2] == (404, "stream_not_found")


async def test_another_key_finds_nothing(tmp_path: Path) -> None:
    async with open_house(tmp_path, api_key=("sk-a", "sk-b")) as house:
        house.scheduler.holds = True
        as_a, as_b = ({"Authorization": f"Bearer sk-{name}"} for name in "ab")
        body = {"prompt": "Hi", "stream": True, **KEPT}
        async with house.http.post(house.url + PATH, json=body, headers=as_a) as response:
            submit = await house.scheduler.submitted()
            response.close()
        await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)
        path = f"/v1/streams/{submit.request_id}"
        wrong = await refused(house, "GET", path, **as_b)
        unknown = await refused(house, "GET", "/v1/streams/cmpl-77", **as_b)
        assert wrong == unknown
        assert wrong[:2] == (404, "stream_not_found")
        assert (await refused(house, "GET", path))[0] == 401
        house.scheduler.finish(submit.request_id)
        async with resumed(house, submit.request_id, **as_a) as events:
            assert (await events.rest())[-1] == "[DONE]"


async def test_what_another_version_wrote_is_not_gone_on_with(house: House) -> None:
    submit, _ = await left(house)
    fields = {**json.loads(submit.context), "version": 99}
    other = type(submit)(submit.request_id, submit.prompt, submit.sampling,
                         context=json.dumps(fields).encode())  # fmt: skip
    house.scheduler.logs[submit.request_id][0].submit = other
    status, code, message = await refused(house, "GET", f"/v1/streams/{submit.request_id}")
    assert (status, code) == (404, "stream_not_found")
    assert "version 99" in message
    with pytest.raises(NotUnderstood):
        unpacked(type(submit)(submit.request_id, (1,), submit.sampling, context=b"[1]"))


async def test_without_a_scheduler_it_is_503(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as (gateway, http):
        url = "http://{}:{}/v1/streams/cmpl-1".format(*gateway.address)
        async with http.get(url) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1


# ------------------------------------------------------------------ gateways that leave


async def test_past_the_drain_streams_say_where_they_go_on_and_are_kept(tmp_path: Path) -> None:
    async with open_house(tmp_path, shutdown_timeout=0.1) as house:
        async with held_stream(house, stop=["stop"]) as held:
            held.run("abc st")
            first = await held.events.next()
            draining = asyncio.create_task(house.gateway.drain())
            told = await held.events.rest()
        await draining
        error = told[-2]["error"]
        assert (error["code"], told[-1]) == ("gateway_draining", "[DONE]")
        assert f"GET /v1/streams/{held.request_id}" in error["message"]
        assert text_of([first, *told]) == "abc "  # what may begin a stop string goes on elsewhere
        await house.scheduler.until(lambda: held.request_id in house.scheduler.detached)
        assert house.scheduler.of(Cancel) == []


async def test_an_answer_in_one_piece_is_503_then_and_cancelled(tmp_path: Path) -> None:
    async with open_house(tmp_path, shutdown_timeout=0.1) as house:
        house.scheduler.holds = True
        asking = asyncio.create_task(house.http.post(house.url + PATH, json={"prompt": "Hi"}))
        await house.scheduler.submitted()
        draining = asyncio.create_task(house.gateway.drain())
        async with await asking as response:
            told = await response.json()
            assert (response.status, told["error"]["code"]) == (503, "gateway_draining")
            assert int(response.headers["Retry-After"]) >= 1
        await draining
        await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))


# ------------------------------------------------------------------ slow readers


async def test_a_client_that_takes_nothing_is_cut_off_and_may_come_back(tmp_path: Path) -> None:
    long = {"max_model_len": 10_000_000}
    async with open_house(tmp_path, slow_reader_timeout_s=0.3, scheduler_options=long) as house:
        house.scheduler.holds = True
        _, writer = await asyncio.open_connection(sock=narrow(house), limit=2**12)
        body = b'{"prompt": "Hi", "stream": true, "max_tokens": 9000000, "return_token_ids": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        submit = await house.scheduler.submitted()
        before = await house.metric('streams_detached_total{reason="slow_reader"}')
        for _ in range(8):  # more than the kernel's buffers hold
            house.scheduler.run(submit.request_id, b"x" * 200_000)
        await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached, 30)
        assert await house.metric('streams_detached_total{reason="slow_reader"}') == before + 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        house.scheduler.finish(submit.request_id)
        async with resumed(house, submit.request_id) as events:
            told = await events.response.read()
        assert b"x" * 1_600_000 in told
        assert told.endswith(b"data: [DONE]\n\n")


async def test_a_refusal_that_nobody_waits_for_is_no_harm(house: House) -> None:
    await house.complete()
    house.scheduler.send(Refused("cmpl-9", ErrorCode.UNKNOWN_STREAM, "no such stream"))
    async with aiohttp.ClientSession() as http, http.get(house.url + "/health") as response:
        assert response.status == 200
