"""The least that server-sent events cost with aiohttp: the same frame to every stream, each beat.

    python -m ops.bench.gateway_load.bare PORT BEAT_S

Started by `gateway_load --cells bare` in a gateway's place: a task a stream, woken once a beat,
which writes one event of a gateway's length and does nothing else.
"""

import asyncio
import sys

import uvloop
from aiohttp import web

FRAME = (
    b"id: cmpl-00112233445566778899aabb01234567:%d\n"
    b'data: {"id":"cmpl-00112233445566778899aabb01234567","object":"text_completion",'
    b'"created":1790000000,"model":"toy","choices":[{"index":0,"text":"x","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


class Beats:
    """Wakes all streams at once."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._events: set[asyncio.Event] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._beat_s)
            for event in self._events:
                event.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Events, until the client leaves."""
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = asyncio.Event()
        self._events.add(event)
        count = 0
        try:
            while True:
                count += 1
                await response.write(FRAME % count)
                await event.wait()
                event.clear()
        finally:
            self._events.discard(event)


async def main() -> None:
    """Serve until killed."""
    beats = Beats(float(sys.argv[2]))
    app = web.Application()
    app.router.add_post("/v1/completions", beats.stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1]), backlog=1024).start()
    await beats.run()


if __name__ == "__main__":
    uvloop.run(main())
