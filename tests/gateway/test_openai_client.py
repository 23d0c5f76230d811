"""The official client against the gateway: its typed objects, streams and errors."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from shared.messages import CancelReason
from shared.sampling import FinishReason
from tests.gateway.house import House
from tests.gateway.scripted_scheduler import EOS, Script

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=house.url + "/v1", api_key="none", max_retries=0
    ) as opened:
        yield opened


async def test_a_chat(house: House, client: openai.AsyncOpenAI) -> None:
    house.scheduler.script.append(Script(["Grüße 世界"], FinishReason.STOP, EOS))
    answer = await client.chat.completions.create(model="toy", messages=CHAT, seed=1)
    assert answer.choices[0].message.content == "Grüße 世界"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_an_answer_goes_back_as_it_came(house: House, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="toy", messages=CHAT)
    message = answer.choices[0].message
    for said in (message.model_dump(), message.model_dump(exclude_none=True), message):
        again = await client.chat.completions.create(model="toy", messages=[*CHAT, said, *CHAT])
        assert again.choices[0].message.content == "ok"


async def test_a_streamed_chat_with_usage(house: House, client: openai.AsyncOpenAI) -> None:
    house.scheduler.script.append(Script(["a\u2028b", "\u0085c\r\nd"]))
    stream = await client.chat.completions.create(
        model="toy", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "a\u2028b\u0085c\r\nd"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len("a\u2028b\u0085c\r\nd".encode())
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


async def test_a_streamed_completion(house: House, client: openai.AsyncOpenAI) -> None:
    house.scheduler.script.append(Script(["one ", "two"]))
    stream = await client.completions.create(model="toy", prompt="Hi", stream=True, max_tokens=9)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"


async def test_closing_a_stream_early_cancels(house: House, client: openai.AsyncOpenAI) -> None:
    house.scheduler.holds = True
    stream = await client.completions.create(model="toy", prompt="Hi", stream=True)
    submit = await house.scheduler.submitted()
    house.scheduler.run(submit.request_id, "abc")
    async for chunk in stream:
        assert chunk.choices[0].text == "abc"
        break
    await stream.close()
    await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["toy"]
    assert (await client.models.retrieve("toy")).owned_by == "splitflap"


async def test_typed_errors(house: House, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="toy", prompt="Hi", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="Hi")
    house.scheduler.script.append(Script(["x"], FinishReason.ERROR, error="NaN logits"))
    stream = await client.completions.create(model="toy", prompt="Hi", stream=True)
    with pytest.raises(openai.APIError, match="NaN logits"):
        [chunk async for chunk in stream]


async def test_twenty_streams_at_once(house: House, client: openai.AsyncOpenAI) -> None:
    house.scheduler.script.extend([Script([f"<{index}>"]) for index in range(20)])

    async def one() -> str:
        stream = await client.completions.create(model="toy", prompt="Hi", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    told = await asyncio.gather(*[one() for _ in range(20)])
    assert sorted(told) == sorted(f"<{index}>" for index in range(20))
