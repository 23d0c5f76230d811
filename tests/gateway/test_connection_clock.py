"""Connections that hang: requests that never arrive, answers that nobody takes."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from services.gateway.connection_clock import ClockTimes, clocked
from shared.messages import Cancel
from tests.gateway.house import House, held_stream, narrow, open_house
from tests.gateway.scripted_scheduler import Script

PATH = "/v1/completions"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"

# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n", b"\n\n"])
async def test_half_a_head_that_hangs_is_408_and_closed(tmp_path: Path, before: bytes) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1) as house:
        told = await house.raw(before + b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConte")
        assert told.startswith(b"HTTP/1.1 408 ")
        head, _, body = told.partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert b"Content-Length: %d" % len(body) in head


async def test_the_clock_stops_when_the_request_is_there(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1, ping_interval_s=0.05) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi") as events:
            submit = await house.scheduler.submitted()
            for _ in range(6):
                assert await events.frame() == [": ping"]
            house.scheduler.finish(submit.request_id)
            assert (await events.rest())[-1] == "[DONE]"


async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1) as house:
        assert await house.raw(b"") == b""


def posted(body: bytes) -> bytes:
    """A completion as it is asked for."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


async def answer_to(connection, sent: bytes) -> bytes:
    """The head of the answer; its body is read as well."""
    reader, writer = connection
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    await reader.readexactly(int(length.split(b":")[1]))
    return head


async def pings(house: House, count: int) -> None:
    """Time passes: so many pings of another client's stream."""
    async with held_stream(house) as held:
        for _ in range(count):
            assert await held.events.frame() == [": ping"]


async def test_half_a_head_on_a_connection_kept_alive_is_408_too(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1) as house:
        reader, writer = connection = await asyncio.open_connection(*house.gateway.address)
        for _ in range(2):
            assert (await answer_to(connection, LIVE)).startswith(b"HTTP/1.1 200")
        writer.write(LIVE[:20])
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_a_connection_between_requests_may_be_silent(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1, ping_interval_s=0.05) as house:
        _, writer = connection = await asyncio.open_connection(*house.gateway.address)
        assert (await answer_to(connection, LIVE)).startswith(b"HTTP/1.1 200")
        await pings(house, 6)
        assert (await answer_to(connection, LIVE + b"\r\n")).startswith(b"HTTP/1.1 200")
        await pings(house, 6)
        assert (await answer_to(connection, LIVE)).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_comes_after_its_answer_begins_no_request(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1, ping_interval_s=0.05) as house:
        _, writer = connection = await asyncio.open_connection(*house.gateway.address)
        post = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf."
        assert (await answer_to(connection, post)).startswith(b"HTTP/1.1 404")
        writer.write(b"half.")
        await pings(house, 6)
        assert (await answer_to(connection, LIVE)).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def test_a_request_that_comes_while_an_answer_is_sent_stops_no_answer(tmp_path: Path) -> None:
    """The answer is made, and more than the buffers hold: its reader takes its time."""
    options = {"max_model_len": 10**7}
    async with open_house(
        tmp_path, request_read_timeout_s=0.1, ping_interval_s=0.05, scheduler_options=options
    ) as house:
        house.scheduler.script.append(Script(runs=[b"x" * 200_000] * 8))
        reader, writer = await asyncio.open_connection(sock=narrow(house), limit=2**12)
        writer.write(posted(b'{"prompt": "Hi", "max_tokens": 9000000, "return_token_ids": true}'))
        made = f'http_requests_total{{path="{PATH}",status="200"}}'
        before = await house.metric(made)
        async with asyncio.timeout(10):
            while await house.metric(made) == before:
                await house.scheduler.until_next()
        writer.write(LIVE.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        await pings(house, 6)
        async with asyncio.timeout(20):
            told = await reader.read()
        head, _, rest = told.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        body, after, _ = rest.rpartition(b"HTTP/1.1 200")
        assert after, "the second request was answered"
        assert json.loads(body)["usage"]["completion_tokens"] == 8 * 200_000
        writer.close()


# ------------------------------------------------------------------ answers


async def test_a_client_that_takes_nothing_is_cut_off_and_its_stream_kept(tmp_path: Path) -> None:
    options = {"max_model_len": 10**7}
    async with open_house(tmp_path, slow_reader_timeout_s=0.2, scheduler_options=options) as house:
        house.scheduler.holds = True
        _, writer = await asyncio.open_connection(sock=narrow(house), limit=2**12)
        body = b'{"prompt": "Hi", "stream": true, "max_tokens": 9000000, "return_token_ids": true}'
        writer.write(posted(body))
        submit = await house.scheduler.submitted()
        for _ in range(8):  # more than the kernel's buffers hold
            house.scheduler.run(submit.request_id, b"x" * 200_000)
        await house.scheduler.until(lambda: submit.request_id in house.scheduler.detached)
        assert house.scheduler.of(Cancel) == []
        writer.close()


class Sender(asyncio.Protocol):
    """Writes all it has at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_lost = asyncio.Event()

    def connection_made(self, transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        transport.write(b"x" * self.size)
        transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost.set()


async def test_a_client_that_takes_little_at_a_time_gets_all() -> None:
    size, stall_s = 2**22, 0.5
    loop = asyncio.get_running_loop()
    sender = Sender(size)
    server = await loop.create_server(
        clocked(lambda: sender, ClockTimes(head_s=30.0, stall_s=stall_s)), "127.0.0.1", 0
    )
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        began, taken = loop.time(), 0
        while portion := await loop.sock_recv(client, 2**16):
            taken += len(portion)
            await asyncio.sleep(0.02)  # this client is slow
        assert taken == size
        assert loop.time() - began > 2 * stall_s
    await sender.is_lost.wait()
    server.close()
