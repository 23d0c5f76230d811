"""The gateway as a process: starting, draining, leaving, and what it must not need."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import structlog

from services.gateway.app import serve
from services.gateway.encoding import Encoder
from services.gateway.readiness import LinkTimes
from shared.errors import StartError
from shared.messages import Submit
from shared.settings import GatewaySettings
from tests.gateway.house import House, open_house, text_of

PATH = "/v1/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_busy_port_is_a_start_error_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = GatewaySettings(model="toy", port=port, request_endpoint=f"ipc://{tmp_path}/r")
        with pytest.raises(StartError, match=f"{port}.*--port"):
            await serve(settings)


@pytest.mark.parametrize("host", ["::1%nowhere", "a..b", "192.0.2.1"])
async def test_a_host_that_is_none_is_a_start_error_about_the_host(tmp_path, host: str) -> None:
    settings = GatewaySettings(model="toy", host=host, request_endpoint=f"ipc://{tmp_path}/r")
    with pytest.raises(StartError, match=r"--host") as caught:
        await serve(settings)
    assert "--port" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    settings = GatewaySettings(model="toy", port=port, request_endpoint=f"ipc://{tmp_path}/r")
    serving = asyncio.create_task(serve(settings))
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        os.kill(os.getpid(), number)
        await serving


async def until_draining(house: House) -> None:
    """Ask /health/ready until it says so."""
    async with asyncio.timeout(5):
        while (told := await house.get("/health/ready"))[1].get("phase") != "draining":
            await house.scheduler.until_next()
    assert told[0] == 503


@pytest.mark.parametrize(
    ("host", "keys", "is_warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("sk-x",), False), ("127.0.0.1", (), False)],
)
async def test_one_that_is_open_to_all_says_so(tmp_path: Path, host, keys, is_warned) -> None:
    settings = GatewaySettings(
        model="toy",
        host=host,
        port=free_port(),
        api_key=keys,
        request_endpoint=f"ipc://{tmp_path}/r",
    )
    with structlog.testing.capture_logs() as events:
        serving = asyncio.create_task(serve(settings))
        async with asyncio.timeout(10):
            while "listening" not in [event["event"] for event in events]:
                await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert ("no_api_keys" in [event["event"] for event in events]) == is_warned


async def test_open_streams_finish_while_it_drains(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        await house.get("/health")  # leaves a connection that is kept alive
        draining = asyncio.create_task(house.gateway.drain())
        await until_draining(house)
        house.scheduler.run(submit.request_id, "whole")
        house.scheduler.finish(submit.request_id)
        told = await events.rest()
    assert text_of(told) == "whole"
    assert told[-1] == "[DONE]"
    await draining


async def test_new_requests_on_old_connections_are_503_while_it_drains(house: House) -> None:
    house.scheduler.holds = True
    await house.get("/health")  # leaves a connection that is kept alive
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        await house.get("/health")
        draining = asyncio.create_task(house.gateway.drain())
        await until_draining(house)
        async with house.http.post(house.url + PATH, json={"prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
        house.scheduler.finish(submit.request_id)
        await events.rest()
    await draining


async def test_a_request_whose_body_was_coming_when_the_drain_began_is_503(house: House) -> None:
    body = b'{"prompt": "Hi"}'
    reader, writer = await asyncio.open_connection(*house.gateway.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    await house.get("/health")
    await house.gateway.drain()
    writer.write(body)
    assert b"503" in await reader.readline()
    assert b"shutting down" in await reader.read()
    assert house.scheduler.of(Submit) == []
    writer.close()
    await writer.wait_closed()


class HeldThreads(ThreadPoolExecutor):
    """Threads that make no tokens of a prompt until they may; `asked` is set when they are to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked, self.may_begin = asyncio.Event(), threading.Event()

    def submit(self, function, /, *args, **kwargs):
        work = function.args[0] if isinstance(function, partial) else function  # of to_thread
        if getattr(work, "__qualname__", "") != Encoder.encode.__qualname__:
            return super().submit(function, *args, **kwargs)
        self.asked.set()

        def begin():
            self.may_begin.wait(10)
            return function(*args, **kwargs)

        return super().submit(begin)


async def test_a_request_being_tokenized_when_the_drain_begins_is_503(house: House) -> None:
    threads = HeldThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    asking = asyncio.create_task(house.post(PATH, prompt="Hi"))
    await threads.asked.wait()
    await house.gateway.drain()
    threads.may_begin.set()
    status, told = await asking
    assert (status, told["error"]["code"]) == (503, "gateway_draining")
    assert house.scheduler.of(Submit) == []


async def test_a_request_being_tokenized_when_the_scheduler_is_lost_is_503(tmp_path: Path) -> None:
    times = LinkTimes(beat_s=0.02, silent_s=0.1, lost_s=0.2)
    async with open_house(tmp_path, times=times) as house:
        threads = HeldThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        asking = asyncio.create_task(house.post(PATH, prompt="Hi"))
        await threads.asked.wait()
        await house.scheduler.close()
        async with asyncio.timeout(10):
            while house.gateway.link.scheduler.takes_requests:
                await asyncio.sleep(0.01)
        threads.may_begin.set()
        status, told = await asking
    assert (status, told["error"]["code"]) == (503, "service_unavailable")
    assert "not ready" in told["error"]["message"]
    assert house.scheduler.of(Submit) == []


async def test_models_version_health_and_metrics(house: House) -> None:
    status, models = await house.get("/v1/models")
    assert status == 200
    assert [card["id"] for card in models["data"]] == ["toy"]
    assert models["data"][0]["max_model_len"] == 8192
    assert (await house.get("/v1/models/toy"))[1]["object"] == "model"
    assert "version" in (await house.get("/version"))[1]
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await house.get(path))[0] == 200
    await house.complete()
    await house.post(PATH, prompt="")
    async with house.http.get(house.url + "/metrics") as response:
        page = await response.text()
    for line in (
        'splitflap:http_requests_total{path="/v1/completions",status="200"}',
        'splitflap:requests_rejected_total{reason="invalid_value"}',
        "splitflap:time_to_first_token_seconds_bucket",
        "splitflap:inter_token_latency_seconds_bucket",
        "splitflap:e2e_request_latency_seconds_bucket",
        "splitflap:open_requests 0.0",
        "splitflap:token_gaps_total",
        "splitflap:streams_resumed_total",
    ):
        assert line in page
    for name in ("prompt_tokens", "generation_tokens", "request_success"):
        assert f"splitflap:{name}" not in page, "the scheduler counts them"


async def test_a_served_model_name_replaces_the_models_own(tmp_path: Path) -> None:
    async with open_house(tmp_path, served_model_name="my model") as house:
        assert (await house.complete(model="my model"))["model"] == "my model"
        assert (await house.post(PATH, prompt="x", model="toy"))[0] == 404


async def test_one_connection_serves_many_requests(house: House) -> None:
    _, writer = connection = await asyncio.open_connection(*house.gateway.address)
    body = b'{"prompt": "Hi"}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    for count in range(1, 4):
        writer.write(request[:20])
        await writer.drain()
        writer.write(request[20:])
        head = await connection[0].readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await connection[0].readuntil(b"}}}")
        assert len(house.scheduler.of(Submit)) == count
    writer.close()
    await writer.wait_closed()


_WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "numpy", "gguf"}:
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocker())
import services.gateway.app
from services.gateway.call import Chat
from services.gateway.chat import ChatTemplate
from services.gateway.tokenizer import load_tokenizer
from shared.model_source import find_model

tokenizer = load_tokenizer(find_model(sys.argv[1]))
print(len(tokenizer.encode("Hello", add_special_tokens=True)))
chat = Chat(({"role": "user", "content": "Hi"},))
print(ChatTemplate(tokenizer.chat).render(chat)[-20:])
"""


@pytest.mark.parametrize(
    "model", ["toy", pytest.param("smollm2-135m-instruct", marks=pytest.mark.model)]
)
def test_it_runs_without_torch_transformers_numpy_or_gguf(model: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _WITHOUT, model], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "assistant" in told.stdout
