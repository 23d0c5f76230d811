"""What a client asks is what the scheduler hears, field by field, and all of it or nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.call import Call
from services.gateway.encoding import Encoder
from services.gateway.gguf_tokenizer import from_gguf
from services.gateway.openai import parse_chat, parse_completion
from services.gateway.tokenizer import ToyTokenizer
from shared.messages import Submit, Welcome
from shared.sampling import DrawParams, SamplingParams
from tests.gateway.house import House
from tests.gateway.scripted_scheduler import EOS, TOY_SHAPE
from tests.gateway.tiny_models import gguf

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "user", "content": "Hi"}]
WELCOME = Welcome(1, "toy", TOY_SHAPE, 16, 8192, (EOS,))


def completion(**fields: Any) -> Call:
    return parse_completion({"prompt": "Hi", "seed": 1, **fields})


def chat(**fields: Any) -> Call:
    return parse_chat({"messages": CHAT, "seed": 1, **fields})


def heard(call: Call) -> SamplingParams:
    """The sampling that goes to the scheduler."""
    return Encoder(ToyTokenizer(), None).encode(call, WELCOME)[0]


DRAWS: list[tuple[dict[str, Any], DrawParams]] = [
    ({}, DrawParams()),
    ({"presence_penalty": -2}, DrawParams(presence_penalty=-2)),
    ({"frequency_penalty": 0.5}, DrawParams(frequency_penalty=0.5)),
    ({"repetition_penalty": 1.1}, DrawParams(repetition_penalty=1.1)),
    ({"logit_bias": {"7": -100, "300": 0.5}}, DrawParams(logit_bias=((7, -100), (300, 0.5)))),
    ({"allowed_token_ids": [3, 1]}, DrawParams(allowed_token_ids=(3, 1))),
    ({"allowed_token_ids": []}, DrawParams()),
    ({"banned_token_ids": [9, 8, 9]}, DrawParams(bad_words=((9,), (8,)))),
    ({"bad_words": ["ab", "c"]}, DrawParams(bad_words=((97, 98), (99,)))),
    ({"bad_words": ["a"], "banned_token_ids": [97, 5]}, DrawParams(bad_words=((97,), (5,)))),
    ({"top_k": -1, "top_p": 0.5, "min_p": 0.1}, DrawParams(top_p=0.5, min_p=0.1)),
]


@pytest.mark.parametrize(("fields", "draw"), DRAWS, ids=repr)
def test_how_tokens_are_drawn(fields: dict[str, Any], draw: DrawParams) -> None:
    assert heard(completion(**fields)).draw == draw
    assert parse_chat({"messages": CHAT, **fields}).sampling.draw.temperature == 1.0


LOGPROBS = [
    (completion(logprobs=0), 0, None),
    (completion(logprobs=5), 5, None),
    (completion(prompt_logprobs=3), None, 3),
    (completion(prompt_logprobs=3, logprobs=2), 2, 3),
    (completion(logprobs=2, echo=True), 2, 2),
    (completion(logprobs=2, prompt_logprobs=2, echo=True), 2, 2),
    (completion(echo=True), None, None),
    (chat(logprobs=True), 0, None),
    (chat(logprobs=True, top_logprobs=4, prompt_logprobs=0), 4, 0),
    (chat(logprobs=False, top_logprobs=0), None, None),
]


@pytest.mark.parametrize(("call", "logprobs", "prompt_logprobs"), LOGPROBS)
def test_which_logprobs_are_wanted(call: Call, logprobs, prompt_logprobs) -> None:
    wanted = (call.sampling.logprobs, call.sampling.prompt_logprobs)
    assert wanted == (logprobs, prompt_logprobs)


def test_the_rest_of_a_call() -> None:
    call = completion(
        return_token_ids=True, include_stop_str_in_output=True, stop="x", stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        add_special_tokens=False,
    )  # fmt: skip
    assert call.return_token_ids
    assert call.include_stop_str_in_output
    assert not call.add_special_tokens
    assert call.stream is not None
    assert call.stream.continuous_usage
    assert completion().add_special_tokens
    assert not chat().add_special_tokens
    assert chat(add_special_tokens=True).add_special_tokens


# ------------------------------------------------------------------ prompts

PROMPTS = [
    ("Hi", [b"Hi"]),
    (["Hi", "Ho"], [b"Hi", b"Ho"]),
    ([72, 105], [b"Hi"]),
    ([[72, 105], [33]], [b"Hi", b"!"]),
]


@pytest.mark.parametrize(("prompt", "sent"), PROMPTS, ids=repr)
async def test_every_form_of_a_prompt(house: House, prompt: Any, sent: list[bytes]) -> None:
    answer = await house.complete(prompt=prompt)
    assert [bytes(submit.prompt) for submit in house.scheduler.of(Submit)] == sent
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_token_ids_are_echoed_as_text(house: House) -> None:
    answer = await house.complete(prompt=[[0x48, 0xC3, 0xA9], [0x21]], echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["Héok", "!ok"]


async def test_one_bad_prompt_and_none_is_sent(house: House) -> None:
    status, told = await house.post(COMPLETIONS, prompt=["a", "b", "x" * 9000, "c"])
    assert (status, told["error"]["param"]) == (400, "prompt[2]")
    assert told["error"]["message"].startswith("prompt[2] has 9000 tokens")
    status, told = await house.post(COMPLETIONS, prompt=[[1], [2, 600]])
    assert (status, told["error"]["param"]) == (400, "prompt[1][1]")
    assert not house.scheduler.of(Submit)


async def test_parts_of_a_message_are_joined(house: House) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    status, _ = await house.post(CHATS, messages=[{"role": "user", "content": parts}])
    assert status == 200
    assert bytes(house.scheduler.of(Submit)[0].prompt) == b"user: one\ntwo\nassistant: "


async def test_an_answer_that_goes_on(house: House) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Well, "}]
    status, _ = await house.post(
        CHATS, messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    assert status == 200
    assert bytes(house.scheduler.of(Submit)[0].prompt) == b"user: Hi\nassistant: Well, "


async def test_a_hundred_thousand_token_ids_do_not_hold_others_up(house: House) -> None:
    body = json.dumps({"prompt": [7] * 200_000 + [600]}).encode()
    headers = {"Content-Type": "application/json"}

    async def large() -> dict[str, Any]:
        url = house.url + COMPLETIONS
        async with house.http.post(url, data=body, headers=headers) as response:
            return (await response.json())["error"]

    asking = asyncio.create_task(large())
    count = 0
    while not asking.done():
        await house.complete()
        count += 1
    assert count > 1
    assert (await asking)["param"] == "prompt[200000]"


# ------------------------------------------------------------------ bad words


def test_a_bad_word_is_banned_after_a_space_too(tmp_path: Path) -> None:
    """As vLLM reads `bad_words`: the spaced form counts if it is one of as many tokens."""
    tokenizer = from_gguf(gguf(tmp_path))
    encoder = Encoder(tokenizer, None)

    def runs(*texts: str) -> list[list[str]]:
        sampling, _ = encoder.encode(completion(bad_words=list(texts)), WELCOME)
        return [[tokenizer.name_of(token) for token in run] for run in sampling.draw.bad_words]

    assert runs("a") == [["a"], ["Ġa"]]
    assert runs(" a") == [["a"], ["Ġa"]]
    assert runs("b") == [["b"]]
    assert runs("abc") == [["abc"]]
    assert runs("a", "a") == [["a"], ["Ġa"]]


# ------------------------------------------------------------------ X-Request-Id


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"prompt": "Hi"}, 200),
        (COMPLETIONS, {"prompt": "Hi", "stream": True}, 200),
        (CHATS, {"messages": CHAT, "stream": True}, 200),
        ("/tokenize", {"prompt": "Hi"}, 200),
        (COMPLETIONS, {"prompt": ""}, 400),
        (COMPLETIONS, {"prompt": "Hi", "model": "gpt-9"}, 404),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
async def test_a_request_id_comes_back_with_every_answer(house, path, fields, status) -> None:
    for sent, comes_back in (("my-id:1", True), ("with space", False)):
        headers = {"X-Request-Id": sent}
        async with house.http.post(house.url + path, json=fields, headers=headers) as response:
            assert response.status == status
            assert (response.headers["X-Request-Id"] == sent) is comes_back
            await response.read()
