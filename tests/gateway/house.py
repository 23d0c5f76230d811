"""A real gateway on a free port, in front of a scripted scheduler."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.gateway.app import Gateway
from services.gateway.readiness import LinkTimes
from shared.ids import RequestId
from shared.messages import Heartbeat, StreamPosition, Submit
from shared.settings import GatewaySettings
from tests.gateway.scripted_scheduler import ScriptedScheduler

QUICK = LinkTimes(beat_s=0.05, silent_s=5.0, lost_s=60.0)
PATIENT = LinkTimes(beat_s=0.5, silent_s=30.0)
"""For very many streams: each beat asks again for all that has not come yet."""


class _AnyPort(GatewaySettings):
    port: int = 0


@dataclass
class House:
    gateway: Gateway
    scheduler: ScriptedScheduler
    http: aiohttp.ClientSession
    endpoint: str

    @property
    def url(self) -> str:
        host, port = self.gateway.address
        return f"http://{host}:{port}"

    async def post(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=fields) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", **{"prompt": "Hi", **fields})
        assert status == 200, answer
        return answer

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def metric(self, sample: str) -> float:
        """One sample of /metrics, by its name (and labels) after the prefix; 0 if absent."""
        async with self.http.get(self.url + "/metrics") as response:
            page = await response.text()
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name == f"splitflap:{sample}":
                return float(value)
        return 0.0

    async def raw(self, sent: bytes) -> bytes:
        """What the server says to these bytes, to its closing of the connection."""
        reader, writer = await asyncio.open_connection(*self.gateway.address)
        writer.write(sent)
        async with asyncio.timeout(10):
            try:
                return await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()

    @asynccontextmanager
    async def stream(self, path: str, **fields: Any) -> AsyncIterator["Events"]:
        async with self.http.post(self.url + path, json={**fields, "stream": True}) as response:
            yield Events(response)


@dataclass
class Events:
    """A stream as its client reads it."""

    response: aiohttp.ClientResponse

    async def frame(self) -> list[str]:
        """The lines of the next frame; none at the end."""
        lines = []
        while line := (await self.response.content.readline()).decode():
            if line == "\n":
                return lines
            lines.append(line.removesuffix("\n"))
        return lines

    async def next(self) -> dict[str, Any] | str:
        """The next event's object, "[DONE]", or "" at the end; pings are skipped."""
        while lines := await self.frame():
            for line in lines:
                if line.startswith("data: "):
                    told = line.removeprefix("data: ")
                    return told if told == "[DONE]" else json.loads(told)
        return ""

    async def rest(self) -> list[Any]:
        """All events to the end of the stream."""
        events = []
        while event := await self.next():
            events.append(event)
        return events


@dataclass
class Held:
    """A stream whose request the scheduler has taken; what comes of it is the test's to say."""

    house: House
    submit: Submit
    events: Events

    @property
    def scheduler(self) -> ScriptedScheduler:
        return self.house.scheduler

    @property
    def request_id(self) -> RequestId:
        return self.submit.request_id

    def run(self, run: bytes | str | Sequence[int], *, lost: bool = False) -> None:
        self.scheduler.run(self.request_id, run, lost=lost)

    def finish(self, *, lost: bool = False) -> None:
        self.scheduler.finish(self.request_id, lost=lost)

    async def is_listed_at(self, position: int) -> None:
        """Until a heartbeat says that the gateway has so many tokens."""
        at = StreamPosition(self.request_id, (position,))
        await self.scheduler.until(
            lambda: any(at in beat.streams for beat in self.scheduler.of(Heartbeat))
        )


@asynccontextmanager
async def held_stream(house: House, **fields: Any) -> AsyncIterator[Held]:
    """A completion's stream, held."""
    house.scheduler.holds = True
    count = len(house.scheduler.of(Submit))
    async with house.stream("/v1/completions", **{"prompt": "Hi", **fields}) as events:
        yield Held(house, await house.scheduler.submitted(count + 1), events)


def narrow(house: House) -> socket.socket:
    """A connection whose kernel keeps little for a reader that does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(house.gateway.address)
    connection.setblocking(False)
    return connection


async def restart(house: House, **options: Any) -> ScriptedScheduler:
    """Another scheduler life on the same endpoint; it knows nothing."""
    await house.scheduler.close()
    house.scheduler = ScriptedScheduler(house.endpoint, **options)
    house.scheduler.holds = True
    return house.scheduler


def text_of(events: list[Any]) -> str:
    """The text of choice 0 of a stream."""
    parts = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else []:
            parts.append(
                choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            )
    return "".join(parts)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """The whole field, as an answer ends with it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@asynccontextmanager
async def open_house(
    folder: Path,
    *,
    times: LinkTimes = QUICK,
    scheduler_options: Any = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """Gateway (ready) and scheduler; everything is given back, whatever happens."""
    endpoint = f"ipc://{folder}/r"
    scheduler = ScriptedScheduler(endpoint, **(scheduler_options or {}))
    settings = {"model": "toy", "request_endpoint": endpoint, **settings}
    gateway = Gateway(_AnyPort(**settings), times)
    try:
        await gateway.start()
        async with aiohttp.ClientSession() as http:
            house = House(gateway, scheduler, http, endpoint)
            await until_ready(house)
            try:
                yield house
            finally:
                await house.scheduler.close()
    finally:
        await gateway.close()
        await scheduler.close()


@asynccontextmanager
async def open_gateway(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway whose scheduler never comes, and a client for it."""
    endpoint = f"ipc://{folder}/nobody"
    gateway = Gateway(_AnyPort(**{"model": "toy", "request_endpoint": endpoint, **settings}), QUICK)
    try:
        await gateway.start()
        async with aiohttp.ClientSession() as http:
            yield gateway, http
    finally:
        await gateway.close()


async def until_ready(house: House) -> None:
    """Ask /health/ready until it says 200."""
    for _ in range(400):
        status, _ = await house.get("/health/ready")
        if status == 200:
            return
        await house.scheduler.until_next()
    raise AssertionError("the gateway did not become ready")
