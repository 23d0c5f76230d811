"""Answers in one piece and as streams, as a client sees them."""

import asyncio
from typing import Any

import pytest

from shared.messages import Cancel, CancelReason, Done, Submit
from shared.sampling import FinishReason
from tests.gateway.house import House, open_house, text_of, usage
from tests.gateway.scripted_scheduler import EOS, Script
from tests.gateway.tiny_models import gguf

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_a_completion_in_one_piece(house: House) -> None:
    house.scheduler.script.append(Script(["Hello", " world"], FinishReason.STOP, EOS))
    answer = await house.complete(max_tokens=20)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "toy"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == usage(2, 11)


async def test_a_chat_in_one_piece(house: House) -> None:
    answer_fields = (await house.post("/v1/chat/completions", **CHAT))[1]
    assert answer_fields["object"] == "chat.completion"
    assert answer_fields["id"].startswith("chatcmpl-")
    message = answer_fields["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "ok", "refusal": None}
    submit = await house.scheduler.submitted()
    assert bytes(submit.prompt) == b"user: Hi\nassistant: "
    assert submit.sampling.max_tokens is None, "a chat may fill the rest of the context"


async def test_a_completion_generates_16_tokens_by_default(house: House) -> None:
    await house.complete()
    assert (await house.scheduler.submitted()).sampling.max_tokens == 16


async def test_a_chat_as_a_stream(house: House) -> None:
    house.scheduler.script.append(Script(["Hello", " world"], FinishReason.STOP, EOS))
    async with house.stream("/v1/chat/completions", **CHAT) as events:
        headers = events.response.headers
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["Cache-Control"] == "no-cache"
        assert headers["X-Accel-Buffering"] == "no"
        first, *rest = await events.rest()
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(rest) == "Hello world"
    assert rest[-2]["choices"][0]["finish_reason"] == "stop"
    assert rest[-1] == "[DONE]"
    assert all(event["id"] == first["id"] for event in rest[:-1])
    assert not any("usage" in event for event in rest[:-1]), "R11: absent unless asked for"


async def test_headers_and_the_role_come_before_any_token(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream("/v1/chat/completions", **CHAT) as events:
        first: Any = await events.next()
        assert first["choices"][0]["delta"]["role"] == "assistant"
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "x")
        house.scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "x"


async def test_a_completions_headers_come_before_any_token(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream("/v1/completions", prompt="Hi") as events:
        assert events.response.status == 200
        assert await events.frame() == [": ping"]


async def test_each_frame_says_where_its_stream_is(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream("/v1/completions", prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        await events.frame()
        house.scheduler.run(submit.request_id, "abc")
        frame = await events.frame()
        assert frame[0] == f"id: {submit.request_id}:3"
        house.scheduler.run(submit.request_id, "de")
        frame = await events.frame()
        assert frame[0] == f"id: {submit.request_id}:5"
        house.scheduler.finish(submit.request_id)
        await events.rest()


async def test_usage_is_one_chunk_without_choices_last_before_done(house: House) -> None:
    """R11."""
    house.scheduler.script.append(Script(["Hello"]))
    options = {"include_usage": True}
    async with house.stream("/v1/chat/completions", **CHAT, stream_options=options) as events:
        told = await events.rest()
    assert told[-1] == "[DONE]"
    assert told[-2]["choices"] == []
    assert told[-2]["usage"] == usage(20, 5)
    assert [event["choices"] == [] for event in told[:-1]].count(True) == 1


async def test_echo_with_no_tokens_to_generate(house: House) -> None:
    """R6."""
    house.scheduler.script.append(Script([]))
    answer = await house.complete(prompt="Hello", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_streamed_echo_comes_first(house: House) -> None:
    house.scheduler.script.append(Script([" world"]))
    async with house.stream("/v1/completions", prompt="Hello", echo=True) as events:
        assert text_of(await events.rest()) == "Hello world"


async def test_two_requests_with_one_client_id_both_finish(house: House) -> None:
    """R7."""
    house.scheduler.holds = True

    async def ask() -> tuple[str, str]:
        headers = {"X-Request-Id": "dup"}
        url = house.url + "/v1/completions"
        async with house.http.post(url, json={"prompt": "Hi"}, headers=headers) as response:
            return response.headers["X-Request-Id"], (await response.json())["choices"][0]["text"]

    both = asyncio.gather(ask(), ask())
    await house.scheduler.submitted(2)
    for name, submit in zip("AB", house.scheduler.of(Submit), strict=True):
        house.scheduler.run(submit.request_id, name)
        house.scheduler.finish(submit.request_id)
    told = await both
    assert [echoed for echoed, _ in told] == ["dup", "dup"]
    assert {text for _, text in told} == {"A", "B"}


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
async def test_a_strange_client_id_is_replaced(house: House, given: str) -> None:
    headers = {"X-Request-Id": given}
    async with house.http.get(house.url + "/version", headers=headers) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_the_finished_request_is_done(house: House) -> None:
    answer = await house.complete()
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))
    assert house.scheduler.of(Done)[0].request_id == answer["id"]


async def test_stop_reason_names_the_clients_stop_token(house: House) -> None:
    house.scheduler.script.append(Script(["ab", "!"], FinishReason.STOP, ord("!")))
    answer = await house.complete(stop_token_ids=[ord("!")])
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("!"))
    assert answer["usage"]["completion_tokens"] == 3, "the stop token counts"


@pytest.mark.parametrize(("ignore_eos", "text"), [(False, "ab"), (True, "ab!")])
async def test_eos_is_text_only_when_it_is_ignored(tmp_path, ignore_eos: bool, text: str) -> None:
    async with open_house(tmp_path) as house:
        house.scheduler.eos = ord("!")
        await house.scheduler.until(
            lambda: bool(house.gateway.link.scheduler.welcome.eos_token_ids[0] == 33)
        )
        house.scheduler.script.append(Script(["ab!"], FinishReason.STOP, ord("!")))
        answer = await house.complete(ignore_eos=ignore_eos)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["stop_reason"] is None


async def test_no_frame_holds_a_line_end_of_any_language(house: House) -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"
    house.scheduler.script.append(Script([text]))
    async with house.stream("/v1/completions", prompt="Hi") as events:
        told = (await events.response.read()).decode()
    assert all(
        "\n" not in part and part.splitlines() == [part] for part in told.split("\n") if part
    )


async def test_a_stop_string_across_tokens_cuts_the_text_and_cancels(house: House) -> None:
    house.scheduler.holds = True
    fields = {"prompt": "Hi", "stop": ["END"], "stream_options": {"include_usage": True}}
    async with house.stream("/v1/completions", **fields) as events:
        submit = await house.scheduler.submitted()
        for run in ("abE", "N", "D", "tail"):
            house.scheduler.run(submit.request_id, run)
        told = await events.rest()
    assert text_of(told) == "ab"
    assert told[-3]["choices"][0]["finish_reason"] == "stop"
    assert told[-3]["choices"][0]["stop_reason"] == "END"
    assert told[-2]["usage"]["completion_tokens"] == 5, "usage ends at the stop string"
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))
    assert house.scheduler.cancels(CancelReason.STOP_STRING) == [submit.request_id]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_comes_after_a_stop_string_cancels_no_more(house: House, stream) -> None:
    """The scheduler hears it once, however much it had sent by then."""
    house.scheduler.holds = True
    fields = {"prompt": ["a", "b"], "stop": ["END"], "stream": stream}
    asking = asyncio.create_task(house.http.post(house.url + "/v1/completions", json=fields))
    await house.scheduler.submitted(2)
    one, two = [submit.request_id for submit in house.scheduler.of(Submit)]
    house.scheduler.run(one, "abEND")
    await house.scheduler.until(lambda: bool(house.scheduler.of(Cancel)))
    for _ in range(3):
        house.scheduler.run(one, "more END")
        house.scheduler.run(two, "x")
        await house.scheduler.until_next()
    house.scheduler.finish(two)
    async with await asking as response:
        await response.read()
    await house.scheduler.until(lambda: len(house.scheduler.of(Done)) == 2)
    assert house.scheduler.of(Cancel) == [Cancel(one, 0, CancelReason.STOP_STRING)]


async def test_a_beginning_of_a_stop_string_comes_out_when_it_is_none(house: House) -> None:
    house.scheduler.script.append(Script(["abE", "N", "Ough"]))
    answer = await house.complete(stop="END")
    assert answer["choices"][0]["text"] == "abENOugh"


async def test_what_was_held_back_comes_out_at_the_end(house: House) -> None:
    house.scheduler.script.append(Script(["abEN"]))
    async with house.stream("/v1/completions", prompt="Hi", stop="END") as events:
        assert text_of(await events.rest()) == "abEN"


@pytest.mark.parametrize("text", ["A 世", "😀", "삼겹살", "a😀b世c"])
async def test_split_characters_never_show(house: House, text: str) -> None:
    """R9: every byte its own token and message."""
    house.scheduler.script.append(Script([bytes((byte,)) for byte in text.encode()]))
    async with house.stream("/v1/completions", prompt="Hi") as events:
        told = await events.rest()
    assert text_of(told) == text
    assert "\ufffd" not in str(told)


async def test_text_that_ends_inside_a_character_flushes_once(house: House) -> None:
    """R9."""
    house.scheduler.script.append(Script([b"A", b"\xe4", b"\xb8"]))
    async with house.stream("/v1/completions", prompt="Hi") as events:
        assert text_of(await events.rest()) == "A\ufffd"


async def test_seeds_are_drawn_when_none_is_given(house: House) -> None:
    await house.complete()
    await house.complete()
    await house.complete(seed=-3)
    first, second, third = [submit.sampling.seed for submit in house.scheduler.of(Submit)]
    assert first != second
    assert third == -3


async def test_what_a_client_asks_reaches_the_scheduler(house: House) -> None:
    await house.complete(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, min_tokens=2, ignore_eos=True,
        stop_token_ids=[7], max_tokens=9, seed=5, n=1, user="me", store=False,
        service_tier="auto", metadata={"a": "b"}, stop=None, best_of=1, logit_bias={},
    )  # fmt: skip
    sampling = (await house.scheduler.submitted()).sampling
    draw = sampling.draw
    assert (draw.temperature, draw.top_p, draw.top_k, draw.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (2, 9, 5)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (7,)


async def test_a_completion_begins_with_bos_and_a_chat_as_its_template_says(tmp_path) -> None:
    model = str(gguf(tmp_path))
    async with open_house(tmp_path, model=model, scheduler_options={"model": "tiny"}) as house:
        await house.complete(prompt="ab")
        await house.post("/v1/chat/completions", **(CHAT | {"model": "tiny"}))
        completion, chat = house.scheduler.of(Submit)
    assert completion.prompt[0] == 0
    assert len(completion.prompt) == 2
    assert chat.prompt[0] == 0, "the template wrote it"
    assert chat.prompt.count(0) == 1
