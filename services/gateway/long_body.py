"""Answers of any length, whole or streamed: made in turns with others, sent in chunks."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from services.gateway.json_portions import Turn

_CHUNK_BYTES: Final = 2**16


class _Chunks(Payload):
    """A body whose chunks are let go as they are sent."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        super().__init__(None, content_type="application/json; charset=utf-8")
        self._size = sum(map(len, chunks))
        self._chunks = deque(chunks)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._chunks).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        while self._chunks:
            await writer.write(self._chunks.popleft())


async def json_response(portions: Iterable[str]) -> web.Response:
    """The answer with this JSON, others having their turns while it is made."""
    turn = Turn()
    chunks: list[bytes] = []
    pending: list[str] = []
    num_pending = 0
    for portion in portions:
        pending.append(portion)
        num_pending += len(portion)
        if num_pending >= _CHUNK_BYTES:
            chunks.append("".join(pending).encode())
            pending, num_pending = [], 0
        await turn.give()
    chunks.append("".join(pending).encode())
    return web.Response(body=_Chunks(chunks))


class StreamWriter:
    """What a stream has to tell, gathered to chunks: of a long answer one chunk is kept, not all.

    Others have their turns while it is made, and while its client is slow to take it.
    """

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._turn = Turn()
        self._pending: list[bytes] = []
        self._num_pending = 0

    def begin(self) -> None:
        """Its reader has waited: the others have had their turns."""
        self._turn.begin()

    def add(self, portion: bytes) -> bool:
        """A portion more; whether it is time to `pause`."""
        self._pending.append(portion)
        self._num_pending += len(portion)
        return self._num_pending >= _CHUNK_BYTES or self._turn.is_over

    async def pause(self) -> None:
        """Send what has come to a chunk; let the others have their turns."""
        if self._num_pending >= _CHUNK_BYTES:
            await self.flush()
        await self._turn.give()

    async def tell(self, portions: Iterable[bytes]) -> None:
        """More of it, or nothing."""
        for portion in portions:
            if self.add(portion):
                await self.pause()

    async def flush(self) -> None:
        """Send what was gathered."""
        if self._pending:
            gathered = b"".join(self._pending)
            self._pending, self._num_pending = [], 0
            await self._response.write(gathered)
