"""A server that answers as a test tells it to, and remembers what it was asked."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

from tests.bench.stamped import DONE, event, said, used

CUT = object()
"""In a script: the connection is cut here."""


def whole(tokens=3, num_choices=1, usage=True):
    """The script of a whole answer."""
    spoken = [said("x", index) for _ in range(tokens) for index in range(num_choices)]
    return [*spoken, *([used(tokens * num_choices)] if usage else []), DONE]


class FakeServer:
    """`answer(body)` gives a script: events, raw bytes, CUT; or (status, body)."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []
        self.headers = []
        self.open = self.most_open = 0
        self.held = asyncio.Event()
        self.url = ""

    async def models(self, request):
        self.headers.append(request.headers)
        return web.json_response({"data": [{"id": "fake"}, {"id": "other"}]})

    async def generate(self, request):
        body = await request.json()
        self.asked.append((request.path, body))
        self.headers.append(request.headers)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._play(request, self.answer(body))
        finally:
            self.open -= 1

    async def _play(self, request, script):
        if isinstance(script, tuple):
            status, text = script
            return web.Response(status=status, text=text)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in script:
            if part is CUT:
                request.transport.abort()
                break
            if isinstance(part, asyncio.Event):
                self.held.set()
                await part.wait()
            else:
                await response.write(part if isinstance(part, bytes) else event(part))
                await asyncio.sleep(0)
        return response


@asynccontextmanager
async def serving(answer=lambda _: whole()):
    server = FakeServer(answer)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/{path:.*}", server.generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def split(script, size):
    """The same bytes in pieces of `size`, borders anywhere."""
    raw = b"".join(part if isinstance(part, bytes) else event(part) for part in script)
    return [raw[start : start + size] for start in range(0, len(raw), size)]


def crlf(script):
    return [json_event.replace(b"\n", b"\r\n") for json_event in map(event, script)]


def asks(body):
    """Text of the last message, or the prompt."""
    return body["messages"][-1]["content"] if "messages" in body else json.dumps(body["prompt"])
