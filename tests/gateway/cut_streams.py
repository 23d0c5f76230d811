"""Streams that are cut off, and how a client goes on with them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.messages import Submit
from tests.gateway.house import Events, House, held_stream

PATH = "/v1/completions"
KEPT = {"stream_options": {"resumable": True}}


@asynccontextmanager
async def resumed(
    house: House, request_id: str, last: str | None = None, **headers: str
) -> AsyncIterator[Events]:
    """GET of a stream, behind the event of that id."""
    if last is not None:
        headers["Last-Event-ID"] = last
    url = f"{house.url}/v1/streams/{request_id}"
    async with house.http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        yield Events(response)


async def id_of_next(events: Events) -> str:
    """The id of the next event that has one."""
    while lines := await events.frame():
        if lines[0].startswith("id: "):
            return lines[0].removeprefix("id: ")
    raise AssertionError("the stream is over")


async def left(house: House, **fields: Any) -> tuple[Submit, str]:
    """A stream of "abc", not whole, whose client has left; and the id of what it got last."""
    async with held_stream(house, **{**KEPT, **fields}) as held:
        held.run("abc")
        last = await id_of_next(held.events)
        held.events.response.close()
    await house.scheduler.until(lambda: held.request_id in house.scheduler.detached)
    return held.submit, last


async def refused(house: House, method: str, path: str, **headers: str) -> tuple[int, str, str]:
    """(status, code, message)."""
    async with house.http.request(method, house.url + path, headers=headers) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], error["message"]
