"""Bodies, heads and prompts a client can get wrong: a clear 4xx in OpenAI's form, always."""

import asyncio
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.gateway.request_body import MAX_VALUES, MalformedBody, parse_object
from shared.errors import ErrorCode
from shared.messages import Refused, Submit
from tests.gateway.house import House, open_house
from tests.gateway.refusals import refused
from tests.gateway.scripted_scheduler import Script

CHAT = [{"role": "user", "content": "Hi"}]
CONTEXT_LENGTH = ErrorCode.CONTEXT_LENGTH
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


BODIES = [
    (b"", "no JSON"),
    (b"{", "no JSON"),
    (b"[1]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'{"prompt": "a"} x', "no JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8 (byte 12)"),
    ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "no JSON"),
    (b'{"prompt": "\\ud83d"}', "surrogate"),
    (b'{"prompt": "\\ude00\\ud83d"}', "surrogate"),
    (b'{"prompt": "a", "stop": ["\\udfff"]}', "surrogate"),
    (b'{"prompt": "a", "\\udfff": 1}', "surrogate"),
    (b'{"prompt": "a", "prompt": "b"}', "twice"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "an integer in the body has more than 4300"),
    (b'{"prompt": ' + b"[" * 90_000, "nested"),
    (b'{"prompt": ' + b"[" * (MAX_VALUES + 10), "too many values"),
    (b'{"metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 101, "nested"),
    (b"{'prompt': 'a'}", "no JSON"),
    (b'{"prompt": "a",}', "no JSON"),
    (b'{"prompt": "a\nb"}', "no JSON"),
]


@pytest.mark.parametrize(("body", "said"), BODIES, ids=lambda value: repr(value)[:40])
async def test_a_malformed_body_is_400(house: House, body: bytes, said: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with house.http.post(house.url + COMPLETIONS, data=body, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert said in error["message"]
    assert len(error["message"]) < 400
    assert not house.scheduler.of(Submit)
    assert (await house.get("/health"))[0] == 200


def test_a_name_given_twice_is_named_with_its_path() -> None:
    with pytest.raises(MalformedBody, match="given twice") as caught:
        parse_object(b'{"stream_options": {"include_usage": true, "include_usage": false}}')
    assert caught.value.param == "stream_options.include_usage"


def test_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(MalformedBody) as caught:
        parse_object(b'{"a": {"b": ["x", "\\ud83d"]}}')
    assert caught.value.param == "a.b[1]"


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", None],
)
async def test_a_wrong_content_type_is_415(house: House, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    skip = [] if content_type else ["Content-Type"]
    async with house.http.post(
        house.url + COMPLETIONS, data=b'{"prompt":"a"}', headers=headers, skip_auto_headers=skip
    ) as response:
        assert response.status == 415
        assert "application/json" in (told := (await response.json())["error"]["message"]) or (
            "UTF-8" in told
        )


async def test_a_charset_of_utf8_is_fine(house: House) -> None:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    async with house.http.post(
        house.url + COMPLETIONS, data=b'{"prompt":"a"}', headers=headers
    ) as response:
        assert response.status == 200


async def test_an_unknown_model_is_404(house: House) -> None:
    status, told = await house.post(COMPLETIONS, prompt="Hi", model="gpt-9")
    assert (status, told["error"]["param"], told["error"]["code"]) == (
        404,
        "model",
        "model_not_found",
    )
    assert "toy" in told["error"]["message"]
    assert (await house.get("/v1/models/gpt-9"))[0] == 404


async def test_unknown_paths_and_methods_answer_in_the_same_form(house: House) -> None:
    status, told = await house.get("/v1/nothing")
    assert (status, told["error"]["code"]) == (404, "not_found")
    async with house.http.get(house.url + COMPLETIONS) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_a_prompt_over_the_context_names_both_numbers(tmp_path: Path) -> None:
    """R20, as far as the gateway sees it."""
    async with open_house(tmp_path, scheduler_options={"max_model_len": 16384}) as house:
        status, param, code, message = await refused(house, COMPLETIONS, {"prompt": "x" * 122_946})
    assert (status, param, code) == (400, "prompt", "context_length_exceeded")
    assert "16384" in message
    assert "122946" in message


async def test_a_chat_over_the_context_names_its_messages(house: House) -> None:
    messages = [{"role": "user", "content": "x" * 9000}]
    status, param, code, _ = await refused(house, CHATS, {"messages": messages})
    assert (status, param, code) == (400, "messages", "context_length_exceeded")


REFUSED_BY_SCHEDULER = [
    ({}, "prompt", "messages"),
    ({"max_tokens": 9}, "max_tokens", "max_tokens"),
    ({"max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
    ({"max_completion_tokens": 9, "stream": True}, "max_tokens", "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "param", "clients"), REFUSED_BY_SCHEDULER, ids=repr)
async def test_the_schedulers_words_become_the_clients(house, fields, param, clients) -> None:
    no = Refused("", CONTEXT_LENGTH, "too long: lower max_tokens", param)
    house.scheduler.script.append(Script(refusal=no))
    status, told = await house.post(CHATS, messages=CHAT, **fields)
    assert (status, told["error"]["param"]) == (400, clients)
    if "max_completion_tokens" in fields:
        assert told["error"]["message"] == "too long: lower max_completion_tokens"


async def test_a_far_too_long_prompt_is_refused_without_counting(house: House) -> None:
    body = io.BytesIO(json.dumps({"prompt": "x" * 3_000_000}).encode())
    headers = {"Content-Type": "application/json"}
    async with house.http.post(house.url + COMPLETIONS, data=body, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least 3000000 tokens" in error["message"]


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_over_the_limit_is_413(tmp_path: Path, has_length: bool) -> None:
    async with open_house(tmp_path, max_body_bytes=10_000) as house:
        body = json.dumps({"prompt": "x" * 20_000}).encode()

        async def portions():
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        async with house.http.post(
            house.url + COMPLETIONS,
            data=body if has_length else portions(),
            headers={"Content-Type": "application/json"},
        ) as response:
            assert response.status == 413
            error = (await response.json())["error"]
        assert error["code"] == "request_too_large"
        assert "10000" in error["message"]
        assert (await house.complete())["choices"][0]["text"] == "ok"


async def test_a_small_gzip_cannot_hide_a_large_body(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_body_bytes=10_000) as house:
        packed = gzip.compress(json.dumps({"prompt": "x" * 2_000_000}).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with house.http.post(
            house.url + COMPLETIONS, data=packed, headers=headers
        ) as response:
            assert response.status == 413


async def test_a_broken_gzip_is_400(house: House) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with house.http.post(
        house.url + COMPLETIONS, data=b"not gzip at all", headers=headers
    ) as response:
        assert response.status == 400


async def test_half_a_body_that_hangs_is_408_and_closed(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_read_timeout_s=0.1) as house:
        told = await house.raw(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt": "He',
        )
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b'"code": "request_timeout"' in told
        assert (await house.complete())["choices"][0]["text"] == "ok"


BODY = b'{"prompt": "Hi", "stream": true}'


async def test_an_http_1_0_client_gets_its_stream_too(house: House) -> None:
    told = await house.raw(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    )
    assert told.endswith(b"data: [DONE]\n\n")
    assert b"Transfer-Encoding" not in told


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(junk=st.binary(min_size=1, max_size=200), is_body=st.booleans())
@example(junk=b"\n\n", is_body=False)
def test_random_bytes_never_hurt(junk_house, junk: bytes, is_body: bool) -> None:
    loop, house = junk_house
    head = b""
    if is_body:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(junk)
        )
    told = loop.run_until_complete(house.raw(head + junk))
    assert told.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) or (not is_body and told == b"")
    assert loop.run_until_complete(house.get("/health"))[0] == 200


@pytest.fixture
def junk_house(tmp_path: Path):
    with asyncio.Runner() as runner:
        # far above what a busy machine takes between a connection and its first byte
        opened = open_house(tmp_path, request_read_timeout_s=0.5)
        house = runner.run(opened.__aenter__())
        yield runner.get_loop(), house
        runner.run(opened.__aexit__(None, None, None))
