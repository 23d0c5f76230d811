"""/tokenize and /detokenize, with the toy's vocabulary and with a scheduler or without one."""

from pathlib import Path
from typing import Any

import pytest

from shared.messages import Submit
from tests.gateway.house import House, open_gateway

TOY = "toy"


async def tokens(house: House, **fields: Any) -> dict[str, Any]:
    status, told = await house.post("/tokenize", **fields)
    assert status == 200, told
    return told


async def test_a_text(house: House) -> None:
    told = await tokens(house, model=TOY, prompt="Hé")
    assert told == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [0x48, 0xC3, 0xA9],
        "token_strs": None,
    }
    assert not house.scheduler.of(Submit)


async def test_how_each_token_is_written(house: House) -> None:
    told = await tokens(house, prompt="Hé", return_token_strs=True)
    assert told["token_strs"] == ["<0x48>", "<0xC3>", "<0xA9>"]


async def test_an_empty_text_has_no_tokens(house: House) -> None:
    assert (await tokens(house, prompt=""))["tokens"] == []


async def test_a_conversation_as_it_would_be_prompted(house: House) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    told = await tokens(house, messages=messages)
    assert bytes(told["tokens"]) == b"user: a\nb\nassistant: "
    await house.post("/v1/chat/completions", messages=messages)
    assert list(house.scheduler.of(Submit)[0].prompt) == told["tokens"]
    told = await tokens(house, messages=messages, add_generation_prompt=False)
    assert bytes(told["tokens"]) == b"user: a\nb\n"
    messages.append({"role": "assistant", "content": "c "})
    told = await tokens(
        house, messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    assert bytes(told["tokens"]) == b"user: a\nb\nassistant: c "


@pytest.mark.parametrize("text", ["", "Hi", "Grüße 世界 😀", "\x00\n"])
async def test_there_and_back(house: House, text: str) -> None:
    told = await tokens(house, prompt=text)
    assert await house.post("/detokenize", tokens=told["tokens"]) == (200, {"prompt": text})


async def test_half_a_character_back_is_marked(house: House) -> None:
    assert (await house.post("/detokenize", tokens=[0xC3]))[1] == {"prompt": "\ufffd"}


BAD = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
    ("/tokenize", {"prompt": "a", "temperature": 1}, 400, "temperature"),
    ("/tokenize", {"prompt": "a", "store": False}, 400, "store"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": None}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 2, 512]}, 400, "tokens[2]"),
    ("/detokenize", {"tokens": [2**63]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param"), BAD, ids=repr)
async def test_what_is_wrong_is_named(house, path, fields, status, param) -> None:
    got, told = await house.post(path, **fields)
    assert (got, told["error"]["param"]) == (status, param)
    assert told["error"]["type"] == "invalid_request_error"


async def test_both_work_while_nothing_else_does(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as (gateway, http):
        url = "http://{}:{}".format(*gateway.address)

        async def ask(path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
            async with http.post(url + path, json=fields) as response:
                return response.status, await response.json()

        assert (await ask("/v1/completions", prompt="Hi"))[0] == 503
        told = {"count": 2, "max_model_len": None, "tokens": [72, 105], "token_strs": None}
        assert await ask("/tokenize", prompt="Hi") == (200, told)
        assert await ask("/detokenize", tokens=[72]) == (200, {"prompt": "H"})
        assert (await ask("/detokenize", tokens=[258]))[0] == 400
