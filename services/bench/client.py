"""Sends requests and stamps what comes back; nothing is understood here, so the client stays light.

Each request has a connection of its own, as if from a client of its own.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from services.bench.recording import Recording
from shared.errors import StartError

_READ_BYTES: Final = 2**20


class Client:
    """One endpoint of one server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._url = url
        self._clock = clock

    async def send(self, body: bytes, recording: Recording) -> None:
        """Post `body` and record the answer; what goes wrong is in the recording, not raised."""
        chunks, clock = recording.chunks, self._clock
        recording.start_s = clock()
        try:
            async with self._session.post(self._url, data=body) as answer:
                recording.status = answer.status
                recording.content_type = answer.content_type
                async for chunk in answer.content.iter_any():
                    chunks.append((clock(), chunk))
        except TimeoutError:
            recording.failure = ("timeout", "no whole answer within --request-timeout")
        except (aiohttp.ClientError, OSError) as error:
            recording.failure = (_kind(recording, error), str(error) or repr(error))
        recording.end_s = clock()


def _kind(recording: Recording, error: Exception) -> str:
    if recording.chunks:
        return "died mid-stream"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    return "connection lost"


@asynccontextmanager
async def open_session(
    headers: Mapping[str, str], timeout_s: float
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit on connections."""
    async with aiohttp.ClientSession(
        headers={"Content-Type": "application/json", **headers},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=_READ_BYTES,
    ) as session:
        yield session


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first name that the server lists.

    Raises: StartError if it lists none.
    """
    url = base_url + "/v1/models"
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            listed = await answer.json(content_type=None)
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise StartError(
            f"{url}: {error or repr(error)}; is the server there (--base-url, --api-key)?"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StartError(f"{url}: lists no model; name one with --model") from error
