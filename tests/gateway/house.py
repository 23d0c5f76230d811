"""A real gateway on a free port, in front of a scripted scheduler."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.gateway.app import Gateway
from services.gateway.link import LinkTimes
from shared.settings import GatewaySettings
from tests.gateway.scripted_scheduler import ScriptedScheduler

QUICK = LinkTimes(beat_s=0.05, silent_s=1.0, lost_s=60.0)


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


def text_of(events: list[Any]) -> str:
    """The text of choice 0 of a stream."""
    parts = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else []:
            parts.append(
                choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            )
    return "".join(parts)


@asynccontextmanager
async def open_house(
    folder: Path, *, times: LinkTimes = QUICK, scheduler_options: Any = None, **settings: Any
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


async def until_ready(house: House) -> None:
    """Ask /health/ready until it says 200."""
    for _ in range(400):
        status, _ = await house.get("/health/ready")
        if status == 200:
            return
        await house.scheduler.until_next()
    raise AssertionError("the gateway did not become ready")
