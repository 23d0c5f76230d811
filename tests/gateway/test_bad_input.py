"""Everything a client can get wrong: a clear 4xx in OpenAI's form, and a server that goes on."""

import asyncio
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.gateway.request_body import MAX_VALUES, MalformedBody, parse_object
from shared.errors import ErrorCode
from shared.messages import Refused, Submit
from tests.gateway.house import House, open_house
from tests.gateway.scripted_scheduler import Script

CHAT = [{"role": "user", "content": "Hi"}]
CONTEXT_LENGTH = ErrorCode.CONTEXT_LENGTH
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def refused(house: House, path: str, fields: dict[str, Any]) -> tuple[int, str, str, str]:
    """(status, param, code, message); the form is checked, and that nothing was submitted."""
    status, told = await house.post(path, **fields)
    assert 400 <= status < 500, told
    assert set(told) == {"error"}
    error = told["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not house.scheduler.of(Submit), "the pool must not hear of it"
    assert (await house.complete())["choices"][0]["text"] == "ok", "the server goes on"
    return status, error["param"], error["code"], error["message"]


def short(value: Any) -> str:
    return repr(value)[:60]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "a string or a list, not an integer"),
    ({"prompt": True}, "prompt", "a string or a list, not a boolean"),
    ({"prompt": {"a": 1}}, "prompt", "a string or a list, not an object"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt[0]", "empty list"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty list"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": ["a", 5]}, "prompt[1]", "is an integer, but prompt[0] is a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", "is a string, but prompt[0] is an integer"),
    ({"prompt": [1, [2]]}, "prompt[1]", "is a list, but prompt[0] is an integer"),
    ({"prompt": [1, True]}, "prompt[1]", "is a boolean"),
    ({"prompt": [True]}, "prompt[0]", "not a boolean"),
    ({"prompt": [None]}, "prompt[0]", "not null"),
    ({"prompt": [1.0]}, "prompt[0]", "not a fraction"),
    ({"prompt": [[1, 2], [3, True]]}, "prompt[1][1]", "not a boolean"),
    ({"prompt": [["a"]]}, "prompt[0][0]", "not a string"),
    ({"prompt": [5, -1]}, "prompt[1]", "no token id"),
    ({"prompt": [5, 2**31]}, "prompt[1]", "no token id"),
    ({"prompt": [5, 512]}, "prompt[1]", "512 is not in the vocabulary (0..511)"),
    ({"prompt": [[1] * 17, [2] * 17 + [600]]}, "prompt[1][17]", "600 is not in the vocabulary"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts, not 1025"),
    ({"prompt": ["a", "x" * 8190]}, "max_tokens", "prompt[1] has 8190 tokens and 16 more"),
    ({"prompt": [[1], [2] * 9000]}, "prompt[1]", "prompt[1] has 9000 tokens"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 5.0}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": -1}, "max_tokens", "at least 0, not -1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**12}, "max_tokens", "at most 2147483647, not 1000000000000"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "above max_tokens 3"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": 1e300}, "temperature", "from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 10**4000}, "n", "at most 2147483647, not 1000"),
    ({"temperature": 10**4000}, "temperature", "too large"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids[0]", "at most"),
    ({"s" * 5000: 1}, "s" * 64 + "...", "not a field"),
    ({"stop": ""}, "stop[0]", "empty"),
    ({"stop": ["a", ""]}, "stop[1]", "empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 1025}, "stop[0]", "at most 1024"),
    ({"stop": 7}, "stop", "list"),
    ({"stop": [7]}, "stop[0]", "string"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "vocabulary (0..511)"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "takes at most 256 ids, not 257"),
    ({"stop_token_ids": "1"}, "stop_token_ids", "list"),
    ({"stream": 1}, "stream", "boolean"),
    ({"stream": "true"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream to true"),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "boolean",
    ),
    ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise", "not a field"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "needs include_usage",
    ),
    ({"echo": 1}, "echo", "boolean"),
    ({"logprobs": 21}, "logprobs", "at most 20, not 21"),
    ({"logprobs": -1}, "logprobs", "at least 0, not -1"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs", "with logprobs 2"),
    ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "number"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "vocabulary (0..511)"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no token id in decimal"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "'05' is no token id in decimal"),
    ({"logit_bias": {"x" * 500: 1}}, "logit_bias", "xxx...' is no token id"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "number"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024"),
    ({"allowed_token_ids": [512]}, "allowed_token_ids", "vocabulary"),
    ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1]", "integer"),
    ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "at most 1024"),
    ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "allowed_token_ids", "leaves no token"),
    ({"banned_token_ids": [5, 512]}, "banned_token_ids[1]", "vocabulary"),
    ({"banned_token_ids": [-1]}, "banned_token_ids[0]", "at least 0"),
    ({"banned_token_ids": [1] * 129}, "banned_token_ids", "at most 128"),
    ({"bad_words": "x"}, "bad_words", "list"),
    ({"bad_words": ["x", ""]}, "bad_words[1]", "empty"),
    ({"bad_words": ["x", "  "]}, "bad_words[1]", "no tokens"),
    ({"bad_words": ["x" * 33]}, "bad_words[0]", "has 33 tokens; at most 32"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]", "at most 128"),
    ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
    ({"return_token_ids": 1}, "return_token_ids", "boolean"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", "boolean"),
    ({"strange": None}, "strange", "not a field"),
    ({"temprature": 1}, "temprature", "not a field"),
    ({"user": 5}, "user", "string"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "takes at most 16 pairs, not 17"),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_COMPLETIONS, ids=short)
async def test_a_bad_completion_field_is_named(house, fields, param, said) -> None:
    fields = fields if "prompt" in fields or not fields else {"prompt": "Hi", **fields}
    status, told, _, message = await refused(house, COMPLETIONS, fields)
    assert (status, told) == (400, param)
    assert said in message
    assert len(message) < 250


TEXT = {"type": "text", "text": "Hi"}


def parts(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": ["Hi"]}, "messages[0]", "must be an object, not a string"),
    ({"messages": [{"role": "x" * 5000, "content": "Hi"}]}, "messages[0].role", "xxx'..."),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [*CHAT, {"role": "user", "content": 5}]}, "messages[1].content", "string"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role", "'user'"),
    (
        {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6},
        "max_completion_tokens",
        "max_tokens is 5",
    ),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"messages": CHAT, "max_completion_tokens": -5}, "max_completion_tokens", "not -5"),
    ({"messages": [{**CHAT[0], "mood": "x"}]}, "messages[0].mood", "not a field"),
    ({"messages": [parts()]}, "messages[0].content", "is empty"),
    ({"messages": [parts("x")]}, "messages[0].content[0]", "must be an object"),
    ({"messages": [parts(TEXT, {})]}, "messages[0].content[1].type", "required"),
    ({"messages": [parts({"type": "text"})]}, "messages[0].content[0].text", "required"),
    ({"messages": [parts(TEXT | {"text": 5})]}, "messages[0].content[0].text", "string"),
    ({"messages": [parts(TEXT | {"mood": 5})]}, "messages[0].content[0].mood", "not a field"),
    ({"messages": CHAT, "top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
    ({"messages": CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
    ({"messages": CHAT, "logprobs": 1}, "logprobs", "boolean"),
    (
        {"messages": CHAT, "continue_final_message": True},
        "continue_final_message",
        "needs add_generation_prompt: false",
    ),
    (
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
        "of the assistant, not of the user",
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CHATS, ids=short)
async def test_a_bad_chat_field_is_named(house, fields, param, said) -> None:
    status, told, _, message = await refused(house, CHATS, fields)
    assert (status, told) == (400, param)
    assert said in message


NOT_YET = [
    (COMPLETIONS, "best_of", {"best_of": 3}),
    (COMPLETIONS, "suffix", {"suffix": "x"}),
    (COMPLETIONS, "use_beam_search", {"use_beam_search": True}),
    (COMPLETIONS, "store", {"store": True}),
    (COMPLETIONS, "service_tier", {"service_tier": "flex"}),
    (COMPLETIONS, "priority", {"priority": 1}),
    (COMPLETIONS, "max_completion_tokens", {"max_completion_tokens": 3}),
    (CHATS, "tools", {"tools": [{"type": "function"}]}),
    (CHATS, "tool_choice", {"tool_choice": "auto"}),
    (CHATS, "response_format", {"response_format": {"type": "json_object"}}),
    (CHATS, "chat_template", {"chat_template": "x"}),
    (CHATS, "messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    (CHATS, "messages[0].name", {"messages": [{**CHAT[0], "name": "x"}]}),
    (CHATS, "messages[0].content[1].type", {"messages": [parts(TEXT, {"type": "image_url"})]}),
    (CHATS, "echo", {"echo": True}),
    (COMPLETIONS, "top_logprobs", {"top_logprobs": 1}),
    (COMPLETIONS, "add_generation_prompt", {"add_generation_prompt": True}),
]


@pytest.mark.parametrize(("path", "param", "fields"), NOT_YET, ids=repr)
async def test_what_is_not_honoured_is_refused_never_ignored(house, path, param, fields) -> None:
    base: dict[str, Any] = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": CHAT}
    status, told, code, message = await refused(house, path, base | fields)
    assert (status, told, code) == (400, param, "unsupported_parameter")
    assert "not supported" in message or "belongs to" in message


NEUTRAL = [
    {"n": 1, "best_of": 1, "logprobs": None, "suffix": None, "user": "x", "service_tier": "auto"},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None},
    {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "suffix": ""},
    {"messages": None, "max_completion_tokens": None, "functions": None, "audio": None},
    {"store": False, "metadata": {}, "seed": None, "stream_options": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=repr)
async def test_what_asks_for_nothing_is_taken(house: House, fields: dict[str, Any]) -> None:
    assert (await house.complete(**fields))["choices"][0]["text"] == "ok"


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
        opened = open_house(tmp_path, request_read_timeout_s=0.05)
        house = runner.run(opened.__aenter__())
        yield runner.get_loop(), house
        runner.run(opened.__aexit__(None, None, None))
