"""Readers of many SSE streams in one process, as cheap as Python has them.

    python -m ops.bench.gateway_load.readers STREAMS MAX_TOKENS PORT [PORT ...]

Started by `gateway_load`, which asks on standard input and gets a JSON line for each question:
`open` (all streams are asked for, then: how many have their headers), `look` (what has come by
now), `watch` (from now on, note when each token of every WATCHED_th stream came) and `seen` (what
was noted). It ends when its input does. Stream i goes to port i modulo their number.
"""

import asyncio
import json
import sys
import time
from typing import Any, Final

import uvloop

AT_ONCE: Final = 64  # streams that are being opened
OPENS_WITHIN_S: Final = 30.0
WATCHED: Final = 8


class Reader(asyncio.Protocol):
    """One stream: counts events, and knows by the id of the last one how many tokens there are."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.num_events = 0
        self.num_tokens = 0
        self.is_open = asyncio.Event()
        self.is_over = False
        self.notes: list[tuple[int, float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """What came; an event that is cut is counted with its other half."""
        if not self.is_open.is_set():
            self.is_open.set()
            if b" 200 " not in data[:16]:
                sys.exit(f"refused: {data[:300]!r}")
        whole = self._tail + data
        end = whole.rfind(b"\n\n") + 2
        if end < 2:
            self._tail = whole
            return
        self._tail = whole[end:]
        self.num_events += whole.count(b"\ndata: {", 0, end)
        at = whole.rfind(b"id: c", 0, end)
        if at >= 0:
            _, _, places = whole[at : at + 80].partition(b"\n")[0].rpartition(b":")
            self.num_tokens = int(places.rstrip(b"te")) if places[:1].isdigit() else 0
            if self.notes is not None:
                self.notes.append((self.num_tokens, time.monotonic()))

    def connection_lost(self, error: Exception | None) -> None:
        """It ended, or was cut off."""
        self.is_over = True
        self.is_open.set()


def request(number: int, max_tokens: int) -> bytes:
    """A completion of the toy's, greedy, as long as it may be, with a prompt of its own."""
    body = json.dumps(
        {
            "prompt": f"{number:05d} tells", "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }
    ).encode()  # fmt: skip
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


class Readers:
    """All of them."""

    def __init__(self, count: int, max_tokens: int, ports: list[int]) -> None:
        self._all = [Reader(request(number, max_tokens)) for number in range(count)]
        self._ports = ports
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> dict[str, Any]:
        """Ask for all streams, some at once."""
        await asyncio.gather(*[self._open(number) for number in range(len(self._all))])
        return {"open": sum(not reader.is_over for reader in self._all)}

    async def _open(self, number: int) -> None:
        reader = self._all[number]
        port = self._ports[number % len(self._ports)]
        async with self._gate:
            await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
            await asyncio.wait_for(reader.is_open.wait(), OPENS_WITHIN_S)

    def look(self) -> dict[str, Any]:
        """Sums over all streams; `begun` is how many have a token."""
        return {
            "at": time.monotonic(),
            "tokens": sum(reader.num_tokens for reader in self._all),
            "events": sum(reader.num_events for reader in self._all),
            "begun": sum(reader.num_tokens > 0 for reader in self._all),
            "over": sum(reader.is_over for reader in self._all),
        }

    def watch(self) -> dict[str, Any]:
        """Note times from now on."""
        for reader in self._all[::WATCHED]:
            reader.notes = []
        return {}

    def seen(self) -> list[list[tuple[int, float]]]:
        """Of each watched stream (tokens there were, monotonic seconds), in order."""
        notes = [reader.notes or [] for reader in self._all[::WATCHED]]
        for reader in self._all:
            reader.notes = None
        return notes


async def main() -> None:
    """Answer questions until there are no more."""
    count, max_tokens, *ports = map(int, sys.argv[1:])
    readers = Readers(count, max_tokens, ports)
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(questions), sys.stdin
    )
    while question := (await questions.readline()).decode().strip():
        answer: Any = getattr(readers, question)()
        if asyncio.iscoroutine(answer):
            answer = await answer
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
