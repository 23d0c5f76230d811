"""The frames of a stream, field by field, and the options that change them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ValidationError

from shared.sampling import FinishReason
from tests.gateway.house import House, held_stream, open_house, text_of
from tests.gateway.scripted_scheduler import EOS, Script

PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

OURS = {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
"""vLLM's, which OpenAI has not."""


async def told_by(house: House, path: str, **fields: Any) -> list[Any]:
    async with house.stream(path, **fields) as events:
        return await events.rest()


def chunks_of(told: list[Any]) -> list[dict[str, Any]]:
    assert told[-1] == "[DONE]"
    return told[:-1]


# ------------------------------------------------------------------ usage


@pytest.mark.parametrize("path", [PATH, CHAT_PATH])
async def test_every_chunk_has_the_usage_field_that_was_asked_for(house: House, path) -> None:
    fields = {"prompt": "Hi"} if path == PATH else CHAT
    for options, expected in (
        (None, {"absent"}),
        ({"include_usage": False}, {"absent"}),
        ({"include_usage": True}, {None}),
    ):
        more = {} if options is None else {"stream_options": options}
        chunks = chunks_of(await told_by(house, path, **fields, **more))
        spoken = [chunk for chunk in chunks if chunk["choices"]]
        assert {chunk.get("usage", "absent") for chunk in spoken} == expected
        assert len(chunks) - len(spoken) == (expected == {None}), "one more, with the usage"


async def test_continuous_usage_grows_with_what_was_delivered(house: House) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with held_stream(house, stop=["END"], stream_options=options) as held:
        told: list[Any] = []
        for run in ("ab", "c", "dEN"):
            held.run(run)
            told.append(await held.events.next())
        held.run("Dxyz")
        told += await held.events.rest()
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(told)]
    assert counts == [2, 3, 6, 7, 7], "it ends at the stop string"
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks_of(told)} == {2}
    assert text_of(told) == "abcd"


# ------------------------------------------------------------------ shapes


async def test_a_chats_frames_are_openais(house: House) -> None:
    house.scheduler.script.append(Script(["Hello"], FinishReason.STOP, EOS))
    chunks = chunks_of(await told_by(house, CHAT_PATH, **CHAT))
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert chunks == [
        {**head, "choices": [{"index": 0, **choice}]}
        for choice in (
            {
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            },
            {"delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None},
            {"delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None},
        )
    ]


async def test_token_ids_are_told_with_their_text(house: House) -> None:
    house.scheduler.script.append(Script(["ab"], FinishReason.STOP, EOS))
    (choice,) = (await house.complete(return_token_ids=True))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98], [72, 105])
    async with held_stream(house, return_token_ids=True) as held:
        held.run("ab")
        first: Any = await held.events.next()
        held.run("c")
        second: Any = await held.events.next()
        held.run((EOS,))
        held.finish()
        last, _ = await held.events.rest()
    parts = [event["choices"][0] for event in (first, second, last)]
    assert [part["token_ids"] for part in parts] == [[97, 98], [99], [EOS]]
    assert parts[0]["prompt_token_ids"] == [72, 105]
    assert not any("prompt_token_ids" in part for part in parts[1:])


async def test_a_chats_prompt_ids_are_beside_the_choices(house: House) -> None:
    _, answer = await house.post(CHAT_PATH, **CHAT, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]) == b"user: Hi\nassistant: "
    assert answer["choices"][0]["token_ids"] == [111, 107]
    house.scheduler.holds = False
    chunks = chunks_of(await told_by(house, CHAT_PATH, **CHAT, return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


async def test_ids_are_told_only_if_asked_for(house: House) -> None:
    (choice,) = (await house.complete())["choices"]
    assert not OURS - {"stop_reason"} & choice.keys()


# ------------------------------------------------------------------ stop strings that stay


async def test_a_stop_string_may_stay_in_the_text(house: House) -> None:
    house.scheduler.holds = True
    fields = {"stop": ["END"], "include_stop_str_in_output": True, "return_token_ids": True}
    async with held_stream(house, **fields) as held:
        held.run("abE")
        first: Any = await held.events.next()
        assert first["choices"][0]["text"] == "abE", "nothing need be held back"
        held.run("NDtail")
        rest = await held.events.rest()
    assert text_of([first, *rest]) == "abEND"
    assert rest[-2]["choices"][0]["stop_reason"] == "END"
    ids = [i for event in [first, *rest[:-1]] for i in event["choices"][0]["token_ids"]]
    assert bytes(ids) == b"abEND"


# ------------------------------------------------------------------ the interval


async def test_an_interval_makes_fewer_events_and_the_same_text(tmp_path) -> None:
    async with (
        open_house(tmp_path, stream_interval=4, ping_interval_s=0.1) as house,
        held_stream(house) as held,
    ):
        assert await held.events.frame() == [": ping"]
        held.run("a")
        told: list[Any] = [await held.events.next()]
        assert text_of(told) == "a", "the first at once"
        held.run("bcd")
        assert await held.events.frame() == [": ping"], "pings come in time"
        held.run("e")
        told.append(await held.events.next())
        assert text_of(told[1:]) == "bcde"
        held.run("f")
        held.finish()
        told += await held.events.rest()
    assert text_of(told) == "abcdef", "the last at the end"


# ------------------------------------------------------------------ the official client's types


def unknown_fields(model: BaseModel, where: str = "") -> Iterator[str]:
    for name in model.model_extra or {}:
        yield f"{where}{name}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{where}{name}.{index}.")


def problems_of(kind: type[BaseModel], fields: dict[str, Any]) -> list[Any]:
    try:
        kind.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        return error.errors()
    return []


def check_typed(kind: type[BaseModel], fields: dict[str, Any], nullable: set[str]) -> None:
    """Validated strictly: OpenAI's own answers have nulls in `nullable` too, and nothing else."""
    problems = problems_of(kind, fields)
    assert all(problem["input"] is None for problem in problems), problems
    assert all(nullable & set(problem["loc"]) for problem in problems), problems
    model = kind.model_construct(**fields)  # the client's own, which builds what is inside
    extra = {name.rsplit(".", 1)[-1] for name in unknown_fields(model)}
    assert extra <= OURS, extra


EVERYTHING = {
    "return_token_ids": True,
    "stop": ["never"],
    "max_tokens": 9,
}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("more", [{}, EVERYTHING, {"logprobs": 2, "echo": True}])
async def test_completions_are_what_the_clients_types_say(house: House, more) -> None:
    answer = await house.complete(**more)
    check_typed(Completion, answer, {"token_logprobs", "top_logprobs"})
    for chunk in chunks_of(await told_by(house, PATH, prompt="Hi", **more, **USAGE)):
        check_typed(Completion, chunk, {"finish_reason", "token_logprobs", "top_logprobs"})


@pytest.mark.parametrize(
    "more", [{}, EVERYTHING, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True}]
)
async def test_chats_are_what_the_clients_types_say(house: House, more) -> None:
    status, answer = await house.post(CHAT_PATH, **CHAT, **more)
    assert status == 200, answer
    check_typed(ChatCompletion, answer, set())
    for chunk in chunks_of(await told_by(house, CHAT_PATH, **CHAT, **more, **USAGE)):
        check_typed(ChatCompletionChunk, chunk, set())
