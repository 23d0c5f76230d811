"""Several answers to one prompt, the best of them, and what the cache had of the prompt."""

import asyncio
import json
import random
from typing import Any

import openai
import pytest

from shared.errors import ErrorCode
from shared.messages import Cancel, CancelReason, Done, Refused, Submit
from shared.sampling import FinishReason
from tests.gateway.house import PATIENT, House, open_house, restart, usage
from tests.gateway.scripted_scheduler import EOS, Script

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BOTH = [(PATH, {"prompt": "Hi"}), (CHAT_PATH, CHAT)]


def texts_of(events: list[Any], count: int) -> list[str]:
    """The text of each choice of a stream."""
    texts = [""] * count
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else []:
            delta = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] += delta
    return texts


def ends_of(events: list[Any]) -> list[tuple[int, str]]:
    """(index, finish reason) of every choice that ended, by index."""
    choices = [c for event in events[:-1] for c in event["choices"]]
    return sorted((c["index"], c["finish_reason"]) for c in choices if c["finish_reason"])


async def streamed(house: House, path: str, **fields: Any) -> list[Any]:
    async with house.stream(path, **fields) as events:
        return await events.rest()


# ------------------------------------------------------------------ n


async def test_each_answer_is_a_choice_and_the_prompt_counts_once(house: House) -> None:
    answer = await house.complete(n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == ["ok", "1ok", "2ok"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"] == usage(2, 8)
    (submit,) = house.scheduler.of(Submit)
    assert submit.sampling.n == 3, "one request, so that its prompt is stored once"


async def test_a_chat_has_several_messages(house: House) -> None:
    _, answer = await house.post(CHAT_PATH, **CHAT, n=2, return_token_ids=True)
    assert [c["message"]["content"] for c in answer["choices"]] == ["ok", "1ok"]
    assert [bytes(c["token_ids"]) for c in answer["choices"]] == [b"ok", b"1ok"]
    assert answer["usage"]["completion_tokens"] == 5


async def test_choices_count_through_prompts_and_answers(house: House) -> None:
    house.scheduler.script.extend([Script(["a"]), Script(["b"])])
    answer = await house.complete(prompt=["x", "y"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"), (1, "1a"), (2, "b"), (3, "1b"),
    ]  # fmt: skip
    assert answer["usage"] == usage(2, 6)


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_a_stream_of_two_has_one_usage_chunk(house: House, path, fields) -> None:
    """R11."""
    more = {"n": 2, "stream_options": {"include_usage": True}}
    told = await streamed(house, path, **fields, **more)
    *spoken, last, end = told
    assert end == "[DONE]"
    assert last["choices"] == []
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in spoken)
    assert last["usage"]["completion_tokens"] == len("ok") + len("1ok")
    assert texts_of(told, 2) == ["ok", "1ok"]
    without = await streamed(house, path, **fields, n=2)
    assert not any("usage" in chunk for chunk in without[:-1])


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_every_choice_of_a_stream_ends_once(house: House, path, fields) -> None:
    """R13, on the frames."""
    house.scheduler.script.append(Script(["Hello", " world"], FinishReason.STOP, EOS))
    told = await streamed(house, path, **fields, n=4, seed=7, temperature=1)
    assert ends_of(told) == [(index, "stop") for index in range(4)]
    assert texts_of(told, 4) == ["Hello world", *[f"{i}Hello world" for i in (1, 2, 3)]]
    if path == CHAT_PATH:
        opening = [chunk["choices"][0] for chunk in told[:4]]
        assert [(c["index"], c["delta"]) for c in opening] == [
            (index, {"role": "assistant", "content": ""}) for index in range(4)
        ]


async def test_an_events_id_says_where_each_choice_is(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", n=3) as events:
        request_id = (await house.scheduler.submitted()).request_id
        await events.frame()
        house.scheduler.run(request_id, "abc", 1)
        assert (await events.frame())[0] == f"id: {request_id}:-.3.-"
        house.scheduler.run(request_id, "de", 2)
        assert (await events.frame())[0] == f"id: {request_id}:-.3.2"
        house.scheduler.run(request_id, "f", 1)
        assert (await events.frame())[0] == f"id: {request_id}:-.4.2"


async def test_the_interval_is_each_choices_own(tmp_path) -> None:
    async with open_house(tmp_path, stream_interval=3) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi", n=2) as events:
            request_id = (await house.scheduler.submitted()).request_id
            told: list[Any] = []
            for index in (0, 1):
                house.scheduler.run(request_id, "a", index)
                told.append(await events.next())
            for run, index in (("bc", 0), ("b", 1), ("d", 0)):
                house.scheduler.run(request_id, run, index)
            told.append(await events.next())
            assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in told] == [
                (0, "a"), (1, "a"), (0, "bcd"),
            ]  # fmt: skip


async def test_a_stop_string_ends_its_own_choice_alone(house: House) -> None:
    house.scheduler.holds = True
    fields = {"prompt": "Hi", "n": 3, "stop": ["END"], "stream_options": {"include_usage": True}}
    async with house.stream(PATH, **fields) as events:
        request_id = (await house.scheduler.submitted()).request_id
        for index, run in enumerate(["on", "abENDtail", "and"]):
            house.scheduler.run(request_id, run, index)
        stop = Cancel(request_id, 1, CancelReason.STOP_STRING)
        await house.scheduler.until(lambda: house.scheduler.of(Cancel) == [stop])
        for index in (0, 2):
            house.scheduler.run(request_id, "!", index)
            house.scheduler.finish(request_id, index=index)
        told = await events.rest()
    assert texts_of(told, 3) == ["on!", "ab", "and!"]
    assert ends_of(told) == [(0, "length"), (1, "stop"), (2, "length")]
    assert told[-2]["usage"]["completion_tokens"] == 3 + 5 + 4
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))
    assert house.scheduler.of(Cancel) == [stop]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_all_its_answers(house: House, stream) -> None:
    house.scheduler.holds = True
    url = house.url + PATH
    fields = {"prompt": "Hi", "n": 4, "stream": stream}
    asking = asyncio.create_task(house.http.post(url, json=fields))
    request_id = (await house.scheduler.submitted()).request_id
    house.scheduler.run(request_id, "abc", 2)
    if stream:
        (await asking).close()
    else:
        asking.cancel()
    gone = Cancel(request_id, None, CancelReason.CLIENT_GONE)
    await house.scheduler.until(lambda: house.scheduler.of(Cancel) == [gone])
    assert house.gateway.link.num_open == 0


async def test_one_that_fails_ends_all_with_one_error(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", n=2) as events:
        request_id = (await house.scheduler.submitted()).request_id
        house.scheduler.run(request_id, "x", 0)
        await events.next()
        house.scheduler.finish(request_id, FinishReason.ERROR, 1, error="NaN logits")
        told = await events.rest()
    assert told[0]["error"]["message"] == "NaN logits"
    assert told[1:] == ["[DONE]"]


async def test_all_answers_go_on_with_the_next_scheduler(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", n=3) as events:
        request_id = (await house.scheduler.submitted()).request_id
        house.scheduler.run(request_id, "12", 0)
        house.scheduler.run(request_id, "whole", 1)
        house.scheduler.finish(request_id, index=1)
        told: list[Any] = [await events.next() for _ in range(3)]
        scheduler = await restart(house)
        again = await scheduler.submitted()
        assert [bytes(one.token_ids) for one in again.generated] == [b"12", b"whole", b""]
        assert [one.finish for one in again.generated] == [None, FinishReason.LENGTH, None]
        for index, run in ((0, "34"), (2, "new")):
            scheduler.run(request_id, run, index)
            scheduler.finish(request_id, index=index)
        told += await events.rest()
    assert texts_of(told, 3) == ["1234", "whole", "new"]
    assert ends_of(told) == [(index, "length") for index in range(3)]


async def test_losses_of_any_choice_are_mended(house: House) -> None:
    house.scheduler.answer = lambda submit: b"the quick brown fox jumps over it all"
    house.scheduler.dice = random.Random(5)
    for stream in (True, False):
        if stream:
            texts = texts_of(await streamed(house, PATH, prompt="Hi", n=5), 5)
        else:
            texts = [choice["text"] for choice in (await house.complete(n=5))["choices"]]
        said = "the quick brown fox jumps over it all"
        assert texts == [said, *[f"{index}{said}" for index in range(1, 5)]]


async def test_a_thousand_choices(tmp_path) -> None:
    async with open_house(tmp_path, times=PATIENT) as house:
        house.scheduler.script.extend([Script([f"<{number}>"]) for number in range(8)])
        told = await streamed(house, PATH, prompt=["p"] * 8, n=128)
    expected = [
        f"{str(i) * (i > 0)}<{number}>" for number in range(8) for i in range(128)
    ]  # fmt: skip
    assert texts_of(told, 1024) == expected
    assert ends_of(told) == [(index, "length") for index in range(1024)]


async def test_too_many_for_the_scheduler_is_said_in_the_clients_word(house: House) -> None:
    refusal = Refused("", ErrorCode.INVALID, "n: is 9; at most 8 sequences run", "n")
    for fields, param in (({"n": 9}, "n"), ({"best_of": 9}, "best_of")):
        house.scheduler.script.append(Script(refusal=refusal))
        status, told = await house.post(PATH, prompt="Hi", **fields)
        assert (status, told["error"]["param"]) == (400, param)
        assert told["error"]["message"] == f"{param}: is 9; at most 8 sequences run"


# ------------------------------------------------------------------ best_of


async def test_the_best_are_told_best_first(house: House) -> None:
    """The scripted log-probability of a token is the lower the greater id % 50 is."""
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(n=2, best_of=4))
    submit = await house.scheduler.submitted()
    assert (submit.sampling.n, submit.sampling.logprobs) == (4, 0)
    for index, run in enumerate([[120], [101, 102] * 4, [106, 103], [101, 114]]):
        house.scheduler.run(submit.request_id, run, index)
        house.scheduler.finish(submit.request_id, index=index)
    answer = await asking
    # Of id % 50 the means are 20, 1.5, 4.5, 7.5 and the sums 20, 12, 9, 15: only by the mean is the
    # second the best.
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert [c["text"] for c in answer["choices"]] == ["efefefef", "jg"]
    assert {c["logprobs"] for c in answer["choices"]} == {None}, "they were not asked for"
    assert answer["usage"] == usage(2, 1 + 8 + 2 + 2), "all that were generated"


async def test_the_best_bring_their_own_logprobs_if_asked_for(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(
        house.complete(prompt=["x", "y"], best_of=2, logprobs=1, echo=True)
    )
    await house.scheduler.submitted(2)
    for number, submit in enumerate(house.scheduler.of(Submit)):
        assert submit.sampling.logprobs == 1
        for index, run in enumerate([[120, 120], [101]] if number else [[101], [120]]):
            house.scheduler.run(submit.request_id, run, index)
            house.scheduler.finish(submit.request_id, index=index)
    choices = (await asking)["choices"]
    assert [c["text"] for c in choices] == ["xe", "ye"]
    assert [c["logprobs"]["tokens"] for c in choices] == [["x", "e"], ["y", "e"]]


async def test_an_impossible_answer_is_the_last(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(n=2, best_of=3))
    submit = await house.scheduler.submitted()
    for index, run in enumerate([[104], [149], [104]]):  # 104 = 8 * 13: minus infinity
        house.scheduler.run(submit.request_id, run, index)
        house.scheduler.finish(submit.request_id, index=index)
    choices = (await asking)["choices"]
    assert [bytes(json.dumps(c["text"]), "ascii") for c in choices] == [b'"\\ufffd"', b'"h"']


@pytest.mark.parametrize("stream", [True, False])
async def test_best_of_as_many_as_are_told_changes_nothing(house: House, stream) -> None:
    if stream:
        told = await streamed(house, PATH, prompt="Hi", n=2, best_of=2)
        assert texts_of(told, 2) == ["ok", "1ok"]
    else:
        answer = await house.complete(n=2, best_of=2)
        assert [choice["text"] for choice in answer["choices"]] == ["ok", "1ok"]
    assert house.scheduler.of(Submit)[0].sampling.logprobs is None


# ------------------------------------------------------------------ the cache


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_what_was_cached_is_always_told(house: House, path, fields) -> None:
    for cached in (0, 2):
        house.scheduler.cached_tokens = cached
        _, answer = await house.post(path, **fields, n=2)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        more = {"n": 2, "stream_options": {"include_usage": True}}
        told = await streamed(house, path, **fields, **more)
        assert told[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_what_was_cached_sums_over_prompts(house: House) -> None:
    house.scheduler.cached_tokens = 1
    assert (await house.complete(prompt=["a", "b", "c"], n=2))["usage"] == usage(3, 15, 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_does_not_hide_what_was_cached(house: House, stream) -> None:
    """The scheduler tells it with its answer to the cancelling of the sequence."""
    house.scheduler.holds = True
    house.scheduler.cached_tokens = 2
    fields = {"prompt": "Hi", "stop": ["."]}
    if stream:
        options = {"include_usage": True}
        async with house.stream(PATH, **fields, stream_options=options) as events:
            request_id = (await house.scheduler.submitted()).request_id
            house.scheduler.run(request_id, "ab.c")
            told = (await events.rest())[-2]["usage"]
    else:
        asking = asyncio.create_task(house.complete(**fields))
        house.scheduler.run((await house.scheduler.submitted()).request_id, "ab.c")
        told = (await asking)["usage"]
    assert told == usage(2, 3, 2)


async def test_no_answer_waits_long_for_what_was_cached(house: House) -> None:
    """A scheduler that died after the stop string: what it knew counts as 0."""
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(stop=["."]))
    submit = await house.scheduler.submitted()
    house.scheduler.is_mute = True
    house.scheduler.run(submit.request_id, "ab.c")
    async with asyncio.timeout(5):
        assert (await asking)["usage"] == usage(2, 3, 0)


async def test_a_salt_and_the_key_reach_the_scheduler(tmp_path) -> None:
    async with open_house(tmp_path, api_key=("sk-one", "sk-two")) as house:
        for key in ("sk-one", "sk-two", "sk-one"):
            headers = {"Authorization": f"Bearer {key}"}
            for path, fields in BOTH:
                body = {**fields, "cache_salt": "x" * 128}
                async with house.http.post(house.url + path, json=body, headers=headers) as told:
                    assert told.status == 200
        submits = house.scheduler.of(Submit)
    assert {submit.cache_salt for submit in submits} == {"x" * 128}
    hashes = [submit.key_hash for submit in submits]
    assert hashes[:2] == hashes[4:] != hashes[2:4]
    assert all(hashes)


async def test_without_a_salt_there_is_none(house: House) -> None:
    await house.complete(cache_salt=None)
    assert house.scheduler.of(Submit)[0].cache_salt == ""


# ------------------------------------------------------------------ the official client


async def test_the_client_reads_all_choices_and_the_cached_tokens(house: House) -> None:
    house.scheduler.cached_tokens = 1
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as client:
        answer = await client.completions.create(model="toy", prompt="Hi", n=2, best_of=3)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens_details.cached_tokens == 1
        stream = await client.chat.completions.create(
            model="toy", stream=True, n=2, stream_options={"include_usage": True}, **CHAT
        )
        texts, last = ["", ""], None
        async for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["ok", "1ok"]
        assert last.usage.prompt_tokens_details.cached_tokens == 1
