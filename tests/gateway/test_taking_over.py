"""Streams that are asked for while they still have a reader, or while it leaves."""

import asyncio
from pathlib import Path

import pytest

from shared.errors import ErrorCode
from shared.messages import Attach, Cancel, Detach, Done, Heartbeat, Refused, Submit
from tests.gateway.cut_streams import KEPT, PATH, id_of_next, refused, resumed
from tests.gateway.house import QUICK, Events, House, held_stream, open_house, restart, text_of


async def test_a_client_that_comes_back_before_it_is_missed_takes_its_stream_along(house) -> None:
    async with held_stream(house) as held:
        held.run("abc")
        last = await id_of_next(held.events)
        async with resumed(house, held.request_id, last) as events:
            told = await held.events.rest()
            held.run("de")
            assert text_of([await events.next()]) == "de"
            held.finish()
            assert (await events.rest())[-1] == "[DONE]"
    assert (told[-2]["error"]["code"], told[-1]) == ("stream_moved", "[DONE]")
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))
    assert house.scheduler.of(Cancel) == []


@pytest.mark.parametrize("options", [{}, KEPT])
async def test_so_it_does_with_each_of_several_prompts(house: House, options) -> None:
    """The first one moves, and its old reader ends, while the others are still to be asked for."""
    house.scheduler.holds = True
    before = await house.metric('streams_detached_total{reason="client_gone"}')
    async with house.stream(PATH, prompt=["A", "B", "C"], **options) as old:
        await house.scheduler.submitted(3)
        ids = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.run(ids[0], "a")
        last = await id_of_next(old)
        async with resumed(house, ids[0], last) as events:
            told = await old.rest()
            assert (told[-2]["error"]["code"], told[-1]) == ("stream_moved", "[DONE]")
            await house.scheduler.until(lambda: len(house.scheduler.of(Attach)) == 3)
            beats = len(house.scheduler.of(Heartbeat))
            await house.scheduler.until(lambda: len(house.scheduler.of(Heartbeat)) > beats + 1)
            assert {one.request_id for one in house.scheduler.of(Heartbeat)[-1].streams} == {*ids}
            assert house.scheduler.detached == {}
            for request_id in ids:
                house.scheduler.run(request_id, "z")
                house.scheduler.finish(request_id)
            told = await events.rest()
    texts = {c["index"]: c["text"] for chunk in told[:-1] for c in chunk["choices"] if c["text"]}
    assert texts == {0: "z", 1: "z", 2: "z"}
    assert house.scheduler.of(Cancel) == []
    assert len(house.scheduler.of(Submit)) == 3
    assert await house.metric('streams_detached_total{reason="client_gone"}') == before


async def test_what_moves_to_another_gateway_in_parts_is_left_to_it(house: House) -> None:
    """This gateway's heartbeat comes between the other's requests for the first and the second."""
    house.scheduler.holds = True
    async with house.stream(PATH, prompt=["A", "B"]) as events:
        await house.scheduler.submitted(2)
        ids = [submit.request_id for submit in house.scheduler.of(Submit)]
        house.scheduler.send(Refused(ids[0], ErrorCode.MOVED, "another gateway has taken it over"))
        told = await events.rest()
    assert told[-2]["error"]["code"] == "stream_moved"
    await house.scheduler.until(lambda: house.scheduler.detached == {ids[1]: False})
    assert house.scheduler.of(Cancel) == []


async def test_who_leaves_while_its_stream_is_asked_for_ends_nothing(house: House) -> None:
    """What it says last would come after the new reader's asking, and count as said of that one."""
    async with held_stream(house) as held:
        held.run("abc")
        last = await id_of_next(held.events)
        house.scheduler.is_mute = True
        url = f"{house.url}/v1/streams/{held.request_id}"
        asking = asyncio.create_task(house.http.get(url, headers={"Last-Event-ID": last}))
        await house.scheduler.until(lambda: bool(house.scheduler.of(Attach)))
        held.events.response.close()
        async with asyncio.timeout(10):
            while house.gateway.link.num_open:
                await house.scheduler.until_next()
        house.scheduler.is_mute = False
        async with await asking as response:
            held.run("de")
            held.finish()
            assert text_of(await Events(response).rest()) == "de"
    assert house.scheduler.of(Cancel) == []
    assert house.scheduler.of(Detach) == []


async def test_who_leaves_while_a_stranger_asks_for_its_stream_is_heard_after_all(
    tmp_path: Path,
) -> None:
    async with open_house(tmp_path, api_key=("sk-a", "sk-b")) as house:
        house.scheduler.holds = True
        as_a, as_b = ({"Authorization": f"Bearer sk-{name}"} for name in "ab")
        body = {"prompt": "Hi", "stream": True}
        async with house.http.post(house.url + PATH, json=body, headers=as_a) as response:
            submit = await house.scheduler.submitted()
            house.scheduler.is_mute = True
            path = f"/v1/streams/{submit.request_id}"
            asking = asyncio.create_task(refused(house, "GET", path, **as_b))
            await house.scheduler.until(lambda: bool(house.scheduler.of(Attach)))
            response.close()
            async with asyncio.timeout(10):
                while house.gateway.link.num_open:
                    await house.scheduler.until_next()
            assert house.scheduler.of(Cancel) == []
            house.scheduler.is_mute = False
            assert (await asking)[:2] == (404, "stream_not_found")
        await house.scheduler.until(lambda: bool(house.scheduler.of(Cancel)))


async def test_what_a_broken_link_kept_back_is_said_before_the_stream_is_asked_for(
    house: House,
) -> None:
    """A client leaves and comes back while the scheduler, which lives on, cannot be reached."""
    async with held_stream(house, **KEPT) as held:
        held.run("abc")
        last = await id_of_next(held.events)
        before = house.scheduler
        await before.close()
        await unsent(house, 4)
        held.events.response.close()
        async with asyncio.timeout(10):
            while house.gateway.link.num_open:
                await unsent(house, 1)
        url = f"{house.url}/v1/streams/{held.request_id}"
        asking = asyncio.create_task(house.http.get(url, headers={"Last-Event-ID": last}))
        await unsent(house, 8)  # it has asked, and in vain
        scheduler = await restart(house, boot=before.boot)
        scheduler.logs = before.logs
        async with await asking as response:
            scheduler.run(held.request_id, "de")
            scheduler.finish(held.request_id)
            assert text_of(await Events(response).rest()) == "de"
    said = [one for one in scheduler.received if isinstance(one, Attach | Detach)]
    assert [type(one) for one in said[:2]] == [Detach, Attach]
    assert not said[0].is_told
    assert Detach not in [type(one) for one in said[1:]]


async def unsent(house: House, count: int) -> None:
    """Until the gateway has failed to send so many messages more."""
    sample = 'messages_unsent_total{link="request"}'
    most = await house.metric(sample) + count
    async with asyncio.timeout(10):
        while await house.metric(sample) < most:
            await asyncio.sleep(QUICK.beat_s / 2)
