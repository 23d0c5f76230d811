"""Bytes that are no HTTP request, and requests whose head says enough: OpenAI's form, always."""

import json

import pytest
import structlog

from tests.gateway.house import House

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
JSON = b"Content-Type: application/json\r\n"
BODY = b'{"prompt": "Hi"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


async def error_of(house: House, sent: bytes) -> tuple[int, str, str]:
    """(status, code, message) of the one answer to these bytes; its form is checked."""
    head, _, body = (await house.raw(sent)).partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    assert b"Content-Type: application/json; charset=utf-8" in headers, head
    told = json.loads(body)
    assert set(told) == {"error"}
    error = told["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "b'" not in error["message"]
    assert "\n" not in error["message"]
    assert (await house.complete())["choices"][0]["text"] == "ok", "the server goes on"
    return int(first.split()[1]), error["code"], error["message"]


BAD_HTTP = [
    (b"nonsense\r\n\r\n", "request line"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "without TLS"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
    (b"GET / HTTP/9.9\r\n\r\n", "HTTP/1.1"),
    (b"GET http://x:99999999/health HTTP/1.1\r\nHost: x\r\n\r\n", "URL"),
    (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "over 8190 bytes"),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", "over 8190 bytes"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 300 + b"\r\n", "Too many headers"),
    (b"GET / HTTP/1.1\r\n\r\n", "Missing 'Host' header"),
    (POST + b"Content-Length: -5\r\n\r\n", "Content-Length"),
    (POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n", "Content-Length"),
    (POST + JSON + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n", "chunk"),
]


@pytest.mark.parametrize(("sent", "said"), BAD_HTTP, ids=lambda value: repr(value[:30]))
async def test_bad_http_is_a_400(house: House, sent: bytes, said: str) -> None:
    status, code, message = await error_of(house, sent)
    assert (status, code) == (400, "bad_request")
    assert said in message
    assert len(message) < 200


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"xyz", b"gzip, br"])
async def test_an_encoding_that_is_not_taken_is_415(house: House, encoding: bytes) -> None:
    sent = POST + JSON + LENGTH + b"Content-Encoding: " + encoding + b"\r\n\r\n" + BODY
    status, code, message = await error_of(house, sent)
    assert (status, code) == (415, "unsupported_media_type")
    assert "send gzip, deflate or none" in message


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health", b"/nowhere"])
async def test_an_unknown_expectation_is_417(house: House, path: bytes) -> None:
    method = b"POST " if path == b"/v1/completions" else b"GET "
    head = POST.replace(b"POST /v1/completions ", method + path + b" ") + b"Expect: 200-maybe\r\n"
    body = JSON + LENGTH + b"\r\n" + BODY if method == b"POST " else b"\r\n"
    status, code, _ = await error_of(house, head + body)
    assert (status, code) == (417, "expectation_failed")


async def test_a_client_that_asks_before_it_sends_its_body(house: House) -> None:
    told = await house.raw(POST + JSON + LENGTH + b"Expect: 100-continue\r\n\r\n" + BODY)
    assert told.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (JSON + b"Content-Length: 1000000000\r\n", (413, "request_too_large")),
        (LENGTH, (415, "unsupported_media_type")),
    ],
)
async def test_a_client_that_asks_first_is_refused_first(house: House, head, answer) -> None:
    """`error_of` finds one answer only: no "100 Continue" before it."""
    status, code, _ = await error_of(house, POST + head + b"Expect: 100-continue\r\n\r\n")
    assert (status, code) == answer


async def test_an_unknown_path_points_to_what_there_is(house: House) -> None:
    status, told = await house.get("/v1/nothing")
    assert status == 404
    assert "/openapi.json" in told["error"]["message"]


async def test_the_log_has_a_clients_id_only_where_it_sent_one(house: House) -> None:
    with structlog.testing.capture_logs() as events:
        for headers in ({}, {"X-Request-Id": "mine"}, {"X-Request-Id": "not printable \t"}):
            async with house.http.get(house.url + "/version", headers=headers) as response:
                assert response.headers["X-Request-Id"]
    told = [event["client_request_id"] for event in events]
    assert told == [None, "mine", None], "and None is left out of a line"
