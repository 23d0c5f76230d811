"""Beam search as clients see it: whole answers, best first, each when all are found."""

import asyncio
from typing import Any

import openai
import pytest

from shared.messages import Cancel, CancelReason, Done, Finished, Submit, TokenRun, Tokens, Usage
from shared.sampling import NO_DRAW, EarlyStopping, FinishReason
from tests.gateway.house import House, open_house, restart, text_of, usage
from tests.gateway.scripted_scheduler import EOS, ScriptedScheduler

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BOTH = [(PATH, {"prompt": "Hi"}), (CHAT_PATH, CHAT)]
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}
FOUND = ["the best", "the next", "last"]


def find(scheduler: ScriptedScheduler, submit: Submit, texts: list[str] = FOUND) -> None:
    """The search is over: every text comes in one run."""
    for index, text in enumerate(texts):
        scheduler.run(submit.request_id, text, index)
        scheduler.finish(submit.request_id, index=index)


def told_by(events: list[Any]) -> list[tuple[int, str, str | None]]:
    """(index, text, finish reason) of each choice of a stream, in the order of their ends."""
    texts: dict[int, str] = {}
    ends = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
            if choice["finish_reason"]:
                ends.append((choice["index"], texts[choice["index"]], choice["finish_reason"]))
    return ends


# ------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_a_search_draws_nothing_and_has_the_width_n(house: House, path, fields) -> None:
    more = {"length_penalty": -2, "early_stopping": "never", "seed": 7, "min_tokens": 1}
    status, _ = await house.post(path, **fields, **BEAMS, **more, max_tokens=9, temperature=0)
    assert status == 200
    sampling = house.scheduler.of(Submit)[0].sampling
    assert (sampling.draw, sampling.use_beam_search, sampling.n) == (NO_DRAW, True, 3)
    assert (sampling.length_penalty, sampling.early_stopping) == (-2.0, EarlyStopping.NEVER)
    assert (sampling.seed, sampling.min_tokens, sampling.max_tokens) == (7, 1, 9)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, EarlyStopping.NO), (False, EarlyStopping.NO), (True, EarlyStopping.YES)],
)
async def test_early_stopping_is_true_or_false(house: House, given, meant) -> None:
    await house.complete(**BEAMS, early_stopping=given)
    assert house.scheduler.of(Submit)[0].sampling.early_stopping is meant


async def test_a_width_of_one_is_a_search_too(house: House) -> None:
    await house.complete(use_beam_search=True)
    sampling = house.scheduler.of(Submit)[0].sampling
    assert (sampling.use_beam_search, sampling.n) == (True, 1)


# ------------------------------------------------------------------ what is answered


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_a_stream_tells_what_a_whole_answer_tells(house: House, path, fields) -> None:
    """R12."""
    house.scheduler.holds = True
    asking = asyncio.create_task(house.post(path, **fields, **BEAMS))
    find(house.scheduler, await house.scheduler.submitted())
    _, answer = await asking
    whole = [
        (c["index"], c["text"] if "text" in c else c["message"]["content"], c["finish_reason"])
        for c in answer["choices"]
    ]
    assert whole == [(index, text, "length") for index, text in enumerate(FOUND)]
    options = {"stream_options": {"include_usage": True}}
    async with house.stream(path, **fields, **BEAMS, **options) as events:
        find(house.scheduler, await house.scheduler.submitted(2))
        *told, last, end = await events.rest()
    assert told_by(told) == whole
    assert end == "[DONE]"
    assert last["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == len("".join(FOUND))


async def test_an_end_of_text_is_no_text_and_a_stop_token_is_named(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(**BEAMS, stop_token_ids=[33]))
    request_id = (await house.scheduler.submitted()).request_id
    ends = ((b"one", EOS, "stop"), (b"two", 33, "stop"), (b"three", None, "length"))
    for index, (text, stop_id, reason) in enumerate(ends):
        ids = [*text, *([] if stop_id is None else [stop_id])]
        house.scheduler.run(request_id, ids, index)
        house.scheduler.finish(request_id, FinishReason(reason), index, stop_token_id=stop_id)
    choices = (await asking)["choices"]
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in choices] == [
        ("one", "stop", None), ("two", "stop", 33), ("three", "length", None),
    ]  # fmt: skip


async def test_logprobs_echo_and_ids_come_with_each(house: House) -> None:
    house.scheduler.holds = True
    fields = {"logprobs": 2, "echo": True, "return_token_ids": True}
    asking = asyncio.create_task(house.complete(**BEAMS, **fields))
    find(house.scheduler, await house.scheduler.submitted())
    answer = await asking
    for choice, text in zip(answer["choices"], FOUND, strict=True):
        assert choice["text"] == "Hi" + text
        assert bytes(choice["token_ids"]) == text.encode()
        assert choice["logprobs"]["tokens"] == list("Hi" + text)
        assert [len(top or ()) >= 2 for top in choice["logprobs"]["top_logprobs"]] == [
            False, *[True] * (len(text) + 1),
        ]  # fmt: skip


async def test_each_prompt_is_a_search_of_its_own(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete(prompt=["a", "b"], use_beam_search=True, n=2))
    await house.scheduler.submitted(2)
    for submit in reversed(house.scheduler.of(Submit)):
        name = bytes(submit.prompt).decode()
        find(house.scheduler, submit, [f"{name}1", f"{name}2"])
    assert [(c["index"], c["text"]) for c in (await asking)["choices"]] == [
        (0, "a1"), (1, "a2"), (2, "b1"), (3, "b2"),
    ]  # fmt: skip


async def test_pings_until_all_are_found(tmp_path) -> None:
    async with open_house(tmp_path, ping_interval_s=0.05) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi", **BEAMS) as events:
            submit = await house.scheduler.submitted()
            assert [await events.frame() for _ in range(3)] == [[": ping"]] * 3
            find(house.scheduler, submit)
            assert [text for _, text, _ in told_by(await events.rest())] == FOUND


async def test_who_leaves_a_search_cancels_it(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", **BEAMS) as events:
        submit = await house.scheduler.submitted()
        await events.frame()
        events.response.close()
    gone = Cancel(submit.request_id, None, CancelReason.CLIENT_GONE)
    await house.scheduler.until(lambda: house.scheduler.of(Cancel) == [gone])


async def test_the_official_client_asks_by_extra_body(house: House) -> None:
    house.scheduler.holds = True
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as client:
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="toy", n=3, **CHAT,
                extra_body={"use_beam_search": True, "length_penalty": 0.5, "deadline_s": 60},
            )
        )  # fmt: skip
        submit = await house.scheduler.submitted()
        assert (submit.sampling.length_penalty, submit.deadline_s) == (0.5, 60.0)
        find(house.scheduler, submit)
        assert [choice.message.content for choice in (await asking).choices] == FOUND


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize("num_told", range(4))
async def test_the_next_scheduler_searches_again_and_nothing_is_told_twice(house, num_told) -> None:
    """It dies before, between and after the answers; after them nothing is asked of the next."""
    house.scheduler.holds = True
    options = {"stream_options": {"include_usage": True}}
    async with house.stream(PATH, prompt="Hi", **BEAMS, **options) as events:
        first = await house.scheduler.submitted()
        await events.frame()
        told: list[Any] = []
        for index, text in enumerate(FOUND[:num_told]):
            house.scheduler.run(first.request_id, text, index)
            house.scheduler.finish(first.request_id, index=index)
            told += [await events.next(), await events.next()]
        if num_told < len(FOUND):
            scheduler = await restart(house)
            again = await scheduler.submitted()
            assert (again.request_id, again.sampling) == (first.request_id, first.sampling)
            assert again.generated == (), "beams go on from nothing but their prompt"
            assert again.resubmitted
            find(scheduler, again)
        told += await events.rest()
    assert told_by(told) == [(index, text, "length") for index, text in enumerate(FOUND)]
    assert told[-2]["usage"] == usage(2, len("".join(FOUND)))
    await house.scheduler.until(lambda: bool(house.scheduler.of(Done)))


async def test_a_text_without_its_end_is_not_told_twice_either(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", **BEAMS) as events:
        first = await house.scheduler.submitted()
        house.scheduler.run(first.request_id, FOUND[0], 0)
        assert text_of([await events.next()]) == FOUND[0]
        scheduler = await restart(house)
        find(scheduler, await scheduler.submitted())
        told = await events.rest()
    assert told_by(told) == [(0, "", "length"), (1, FOUND[1], "length"), (2, FOUND[2], "length")]


async def test_a_whole_answer_survives_a_restart(house: House) -> None:
    house.scheduler.holds = True
    fields = {"logprobs": 1, "prompt_logprobs": 1}
    asking = asyncio.create_task(house.complete(**BEAMS, **fields))
    first = await house.scheduler.submitted()
    house.scheduler.run(first.request_id, FOUND[0], 0)
    house.scheduler.finish(first.request_id, index=0)
    at = (len(FOUND[0]), 0, 0)
    heard = house.scheduler.received
    await house.scheduler.until(
        lambda: any(s.positions == at for m in heard for s in getattr(m, "streams", ()))
    )
    scheduler = await restart(house)
    again = await scheduler.submitted()
    assert len(again.prompt_logprobs) == 1, "what was scored is not scored again"
    find(scheduler, again)
    answer = await asking
    assert [choice["text"] for choice in answer["choices"]] == FOUND
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [
        len(text) for text in FOUND
    ]


async def test_a_search_the_scheduler_forgot_begins_again(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", **BEAMS) as events:
        first = await house.scheduler.submitted()
        house.scheduler.run(first.request_id, FOUND[0], 0)
        house.scheduler.finish(first.request_id, index=0)
        told = [await events.next(), await events.next()]
        del house.scheduler.logs[first.request_id]
        again = await house.scheduler.submitted(2)
        assert again.generated == ()
        find(house.scheduler, again)
        told += await events.rest()
    assert [text for _, text, _ in told_by(told)] == FOUND


@pytest.mark.parametrize("has_come", [True, False])
async def test_a_search_told_in_part_is_made_again_for_as_many_tokens(house, has_come) -> None:
    """Beside other pinned prefixes another number would fit: other texts might be the best."""
    house.scheduler.holds = True
    async with house.stream(CHAT_PATH, **CHAT, **BEAMS) as events:
        first = await house.scheduler.submitted()
        assert first.sampling.max_tokens is None
        if has_come:
            house.scheduler.run(first.request_id, FOUND[0], 0)
            house.scheduler.finish(first.request_id, index=0)
            await events.next()
        else:
            await events.frame()  # a ping: it is accepted
        del house.scheduler.logs[first.request_id]
        again = await house.scheduler.submitted(2)
        assert again.sampling.max_tokens == (100 if has_come else None)
        find(house.scheduler, again)
        told = await events.rest()
    assert told[-1] == "[DONE]"


# ------------------------------------------------------------------ long answers, all at once


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hundred_long_answers_come_at_once_and_hold_up_nobody(house: House, stream) -> None:
    """128 answers of 8,000 tokens in one burst, and somebody else asks meanwhile."""
    house.scheduler.holds = True
    length, width = 8000, 128
    body = {"prompt": "Hi", "use_beam_search": True, "n": width, "max_tokens": length}
    asking = asyncio.create_task(house.http.post(house.url + PATH, json=body | {"stream": stream}))
    request_id = (await house.scheduler.submitted()).request_id
    ids = tuple(b"0123456789" * (length // 10))
    for index in range(width):
        house.scheduler.send(Tokens((TokenRun(request_id, index, 0, ids),)))
        house.scheduler.send(
            Finished(request_id, index, FinishReason.LENGTH, length, Usage(2, length * width))
        )
    house.scheduler.holds = False
    other = asyncio.create_task(house.complete())
    async with await asking as response:
        assert (await other)["choices"][0]["text"] == "ok"
        raw = await response.read()
    assert raw.count(bytes(ids)) == width
    assert raw.count(b'"finish_reason":"length"') == width
    assert raw.endswith(b"data: [DONE]\n\n") == stream
