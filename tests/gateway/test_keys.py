"""API keys: nobody gets past the door without one, and no one learns one."""

import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import structlog

from services.gateway.keys import ApiKeys
from shared.messages import Submit
from tests.gateway.house import House, open_house

KEY, OTHER = "sk-first", "sk-second~!"
GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/toy"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("GET", "/v1/completions"),
    ("GET", "/health/"),
    ("GET", "/healthy"),
]


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path, api_key=(KEY, OTHER)) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_everything_but_health_needs_a_key(locked: House, method: str, path: str) -> None:
    headers = {"X-Request-Id": "mine"}
    async with locked.http.request(method, locked.url + path, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.headers["X-Request-Id"] == "mine"
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    async with locked.http.request(method, locked.url + path, headers=bearer(KEY)) as response:
        assert response.status != 401


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
async def test_health_needs_none(locked: House, path: str) -> None:
    assert (await locked.get(path))[0] == 200


BAD = ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY} x",
       f"Bearer {KEY}é", f"Bearer {KEY[:-1]}"]  # fmt: skip


@pytest.mark.parametrize("header", BAD)
async def test_what_is_no_good_key_is_refused(locked: House, header: str) -> None:
    headers = {"Authorization": header}
    async with locked.http.get(locked.url + "/v1/models", headers=headers) as response:
        assert response.status == 401
        assert header.removeprefix("Bearer ") not in (await response.text()) or len(header) < 8
    assert not locked.scheduler.of(Submit)


async def test_two_keys_at_once_are_none(locked: House) -> None:
    told = await locked.raw(
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Authorization: Bearer sk-first\r\nAuthorization: Bearer wrong\r\n\r\n"
    )
    assert told.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_each_key_opens_and_its_hash_goes_along(locked: House, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=locked.url + "/v1", api_key=key) as client:
        await client.completions.create(model="toy", prompt="Hi")
    (submit,) = locked.scheduler.of(Submit)
    assert submit.key_hash == hashlib.sha256(key.encode()).digest()[:16]


async def test_the_official_client_understands_the_refusal(locked: House) -> None:
    async with openai.AsyncOpenAI(base_url=locked.url + "/v1", api_key="no") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.completions.create(model="toy", prompt="Hi")
    assert caught.value.code == "invalid_api_key"
    assert "incorrect API key" in caught.value.message


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "needs an API key"),
        ("Bearer ", "needs an API key"),
        ("Bearer x", "incorrect API key"),
    ],
)
async def test_a_wrong_key_and_none_are_told_apart(locked: House, header, said: str) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with locked.http.get(locked.url + "/v1/models", headers=headers) as response:
        assert said in (await response.json())["error"]["message"]


async def test_without_keys_any_header_will_do_and_there_is_no_hash(house: House) -> None:
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as client:
        await client.completions.create(model="toy", prompt="Hi")
    assert house.scheduler.of(Submit)[0].key_hash == b""


async def test_a_large_body_without_a_key_is_not_read(locked: House) -> None:
    told = await locked.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 4000000\r\n\r\n"
    )
    assert told.startswith(b"HTTP/1.1 401 ")


async def test_keys_are_in_no_log(locked: House) -> None:
    with structlog.testing.capture_logs() as events:
        for key in (KEY, "sk-wrong"):
            async with locked.http.get(locked.url + "/v1/models", headers=bearer(key)):
                pass
    assert [event["status"] for event in events if event["event"] == "request_finished"] == [
        200,
        401,
    ]
    assert "sk-" not in repr(events)


def test_nothing_shows_a_key() -> None:
    keys = ApiKeys((KEY,))
    assert KEY not in repr(keys)
    assert KEY not in repr(vars(keys))


async def test_metrics_may_have_a_port_of_their_own_that_needs_no_key(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with open_house(tmp_path, api_key=(KEY,), metrics_port=port) as house:
        async with house.http.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.status == 200
            assert "splitflap:open_requests" in await response.text()
        async with house.http.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 404, "and nothing else is there"
        assert (await house.get("/metrics"))[0] == 401
