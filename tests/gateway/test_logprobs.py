"""Log-probabilities of answers and prompts, as a client sees them."""

import json
import math
from typing import Any

import pytest

from services.gateway.call import Prompt
from services.gateway.echo import prompt_offsets
from services.gateway.logprob_fields import LOWEST, LogprobFields, PlacedTokens, prompt_logprobs
from services.gateway.token_names import TokenNames
from services.gateway.tokenizer import ToyTokenizer, load_tokenizer
from shared.ids import RequestId
from shared.messages import (
    CancelReason,
    Finished,
    PositionLogprobs,
    StreamPosition,
    TokenRun,
    Tokens,
    Usage,
)
from shared.sampling import FinishReason
from tests.gateway.house import House, restart, text_of, usage
from tests.gateway.scripted_scheduler import EOS, Script, places_of
from tests.gateway.telling import Delivery, Telling, call_of, prompt_of
from tests.gateway.test_tokenizer import byte_level_core, folder_of

PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
NAMES = TokenNames(ToyTokenizer())


def of_one(endpoint: Any, token_id: int, places: PositionLogprobs, num_top: int) -> Any:
    return LogprobFields(endpoint, num_top, NAMES).of(PlacedTokens([token_id], [places], [0]))


def ranked_of(prompt: Any, logprobs: Any) -> Any:
    return json.loads("".join(prompt_logprobs(NAMES, prompt, logprobs).portions()))


# ------------------------------------------------------------------ forms


def test_a_completion_has_the_likeliest_and_the_chosen() -> None:
    told = of_one("completion", ord("c"), PositionLogprobs(-3.0, 9, (97, 98), (-0.5, -1.5)), 2)
    assert told["top_logprobs"] == [{"c": -3.0, "a": -0.5, "b": -1.5}]
    told = of_one("completion", ord("a"), PositionLogprobs(-0.5, 1, (97, 98), (-0.5, -1.5)), 2)
    assert told["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_a_chat_has_exactly_as_many_as_asked(num_top: int) -> None:
    places = PositionLogprobs(-3.0, 9, (97, 98)[:num_top], (-0.5, -1.5)[:num_top])
    (entry,) = of_one("chat", ord("c"), places, num_top)["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("c", -3.0, [ord("c")])
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"][:num_top]


def test_tokens_may_be_written_as_ids() -> None:
    names = TokenNames(ToyTokenizer(), as_ids=True)
    places = PositionLogprobs(-1.0, 1, (0xE4, 97), (-1.0, -2.0))
    token = PlacedTokens([0xE4], [places], [0])
    told = LogprobFields("completion", 2, names).of(token)
    assert told["tokens"] == ["token_id:228"]
    assert told["top_logprobs"] == [{"token_id:228": -1.0, "token_id:97": -2.0}]
    (entry,) = LogprobFields("chat", 2, names).of(token)["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:228", [0xE4])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_may_ask_for_ids(house: House, is_streamed: bool) -> None:
    house.scheduler.script.append(Script(["a"]))
    asked = {"prompt": "Hi", "logprobs": 0, "return_tokens_as_token_ids": True}
    if is_streamed:
        async with house.stream(PATH, **asked) as events:
            choices = [event["choices"][0] for event in await events.rest() if event != "[DONE]"]
    else:
        choices = (await house.complete(**asked))["choices"]
    (told,) = [choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]]
    assert told == ["token_id:97"]


async def test_a_prompt_may_be_scored_and_nothing_generated(house: House) -> None:
    house.scheduler.script.append(Script([]))
    answer = await house.complete(prompt="Hi", max_tokens=0, prompt_logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == ""
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert str(ord("i")) in second


def test_half_a_character_is_told_apart_in_both_forms() -> None:
    """As OpenAI does: `bytes:` in completions, U+FFFD and the true bytes in chats."""
    places = PositionLogprobs(-1.0, 1, (0xE4, 0xB8), (-1.0, -2.0))
    told = of_one("completion", 0xE4, places, 2)
    assert told["tokens"] == ["bytes:\\xe4"]
    assert set(told["top_logprobs"][0]) == {"bytes:\\xe4", "bytes:\\xb8"}
    (entry,) = of_one("chat", 0xE4, places, 2)["content"]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xE4])
    assert [top["bytes"] for top in entry["top_logprobs"]] == [[0xE4], [0xB8]]


def test_what_is_impossible_is_minus_9999_everywhere() -> None:
    places = PositionLogprobs(-math.inf, 400, (97,), (-math.inf,))
    told = of_one("completion", 98, places, 1)
    assert told["token_logprobs"] == [LOWEST]
    assert told["top_logprobs"] == [{"b": LOWEST, "a": LOWEST}]
    (entry,) = of_one("chat", 98, places, 1)["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (LOWEST, LOWEST)
    field = ranked_of((97, 98), [places])
    assert {one["logprob"] for one in field[1].values()} == {LOWEST}


def test_prompt_logprobs_have_ranks_and_begin_with_null() -> None:
    places = PositionLogprobs(-3.0, 9, (97, 98), (-0.5, -1.5))
    assert ranked_of((104, 105), [places]) == [
        None,
        {
            "105": {"logprob": -3.0, "rank": 9, "decoded_token": "i"},
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
    ]
    assert ranked_of((104,), []) == [None]


def test_special_tokens_are_written_by_their_names(tmp_path) -> None:
    names = TokenNames(load_tokenizer(folder_of(tmp_path, byte_level_core())))
    assert names.key(256) == names.text(256) == "<|end|>"
    assert names.bytes_of(256) == b"<|end|>"


# ------------------------------------------------------------------ where tokens begin


def test_a_prompts_tokens_begin_where_its_text_says(tmp_path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level_core()))
    text = "é<|end|>世 <tool é>!"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert list(prompt_offsets(tokenizer, Prompt(ids, text))) == [0, 0, 1, 8, 8, 8, 9, 10, 18]


def test_a_token_that_is_not_in_the_text_takes_no_room(tmp_path) -> None:
    """Such as the one that begins every text."""
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level_core()))
    ids = (256, *tokenizer.encode("ab", add_special_tokens=False))
    assert list(prompt_offsets(tokenizer, Prompt(ids, "ab"))) == [0, 0, 1]


def test_offsets_never_point_beyond_the_text() -> None:
    ids = tuple(b"abcdef")
    assert list(prompt_offsets(ToyTokenizer(), Prompt(ids, "xy"))) == [0, 1, 2, 2, 2, 2]


def test_a_token_in_a_stop_string_begins_where_the_text_ends() -> None:
    call = call_of(logprobs=0, stop=["END"])
    choice = Telling(call).in_one_piece([Delivery(b"abENDing")])["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "E", "N", "D"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]


def test_a_token_held_back_for_nothing_begins_where_its_text_does() -> None:
    call = call_of(logprobs=0, stop=["END"])
    choice = Telling(call).in_one_piece([Delivery(b"ENO")])["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_an_echo_counts_from_the_prompts_first_character() -> None:
    call = call_of(logprobs=1, echo=True)
    told = Telling(call, [prompt_of("é!")]).in_one_piece([Delivery("世x".encode())])
    choice = told["choices"][0]
    assert choice["text"] == "é!世x"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2, 3]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["token_ids"] == list("世x".encode()), "the answer's; the prompt has its own field"


def test_a_streamed_echo_tells_the_same(tmp_path) -> None:
    call = call_of(logprobs=1, echo=True)
    prompts = [prompt_of("é!"), prompt_of("x")]
    deliveries = [Delivery("世x".encode(), [(0, 1), (1, 2)]), Delivery(b"yz", [(0, 1)])]
    told = Telling(call, prompts).as_stream(deliveries)
    whole = Telling(call, prompts).in_one_piece(deliveries)
    for index, choice in enumerate(whole["choices"]):
        assert told.text(index) == choice["text"]
        assert told.token_ids(index) == choice["token_ids"]
        joined = told.logprobs(index)
        assert joined == choice["logprobs"]
        assert told.choices(index)[0]["text"] == prompts[index].text, "the prompt comes first"


# ------------------------------------------------------------------ over HTTP


async def test_a_completion_with_logprobs(house: House) -> None:
    house.scheduler.script.append(Script(["Hel", "lo"], FinishReason.STOP, EOS))
    choice = (await house.complete(logprobs=2))["choices"][0]
    ids, told = tuple(b"Hello"), choice["logprobs"]
    places = [places_of(token_id, 2 + index, 2) for index, token_id in enumerate(ids)]
    assert told["tokens"] == ["H", "e", "l", "l", "o"]
    assert told["token_logprobs"] == [max(LOWEST, place.chosen) for place in places]
    assert told["text_offset"] == [0, 1, 2, 3, 4]
    assert (await house.scheduler.submitted()).sampling.logprobs == 2


async def test_a_chat_with_logprobs(house: House) -> None:
    house.scheduler.script.append(Script(["Hi"]))
    fields = {**CHAT, "logprobs": True, "top_logprobs": 3}
    status, answer = await house.post("/v1/chat/completions", **fields)
    assert status == 200, answer
    told = answer["choices"][0]["logprobs"]
    assert told["refusal"] is None
    assert [entry["token"] for entry in told["content"]] == ["H", "i"]
    assert [len(entry["top_logprobs"]) for entry in told["content"]] == [3, 3]


async def test_a_streams_end_tells_of_tokens_that_are_no_text(house: House) -> None:
    house.scheduler.holds = True
    fields = {**CHAT, "logprobs": True}
    async with house.stream("/v1/chat/completions", **fields) as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "Hi")
        assert [await events.next() for _ in ("role", "Hi")]
        house.scheduler.run(submit.request_id, (EOS,))
        house.scheduler.finish(submit.request_id, FinishReason.STOP, stop_token_id=EOS)
        last, done = await events.rest()
    assert done == "[DONE]"
    choice = last["choices"][0]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "stop")
    assert len(choice["logprobs"]["content"]) == 1


async def test_echo_of_nothing_more_with_logprobs(house: House) -> None:
    """R6: the prompt's own, the first null, and nothing is generated."""
    house.scheduler.script.append(Script([]))
    answer = await house.complete(prompt="Hello", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert choice["logprobs"]["tokens"] == ["H", "e", "l", "l", "o"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert answer["usage"] == usage(5, 0)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_streamed_echo_waits_for_the_prompts_logprobs(house: House, lost: bool) -> None:
    house.scheduler.holds = True
    fields = {"prompt": "Hey", "echo": True, "max_tokens": 0, "logprobs": 0}
    async with house.stream(PATH, **fields) as events:
        submit = await house.scheduler.submitted()
        assert await events.frame() == [": ping"], "headers are out at once"
        house.scheduler.run(submit.request_id, (), lost=lost)
        house.scheduler.finish(submit.request_id)
        first, last, done = await events.rest()
    assert first["choices"][0]["text"] == "Hey"
    assert first["choices"][0]["logprobs"]["tokens"] == ["H", "e", "y"]
    assert first["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert last["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_prompt_logprobs_have_a_field_of_their_own(house: House) -> None:
    house.scheduler.script.extend([Script(["x"]), Script(["x"])])
    choice = (await house.complete(prompt="Hey", prompt_logprobs=1))["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    assert str(ord("e")) in choice["prompt_logprobs"][1]
    _, chat = await house.post("/v1/chat/completions", **CHAT, prompt_logprobs=0)
    assert [len(place) for place in chat["prompt_logprobs"][1:]] == [1] * 19
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_a_next_scheduler_gets_all_logprobs_back(house: House) -> None:
    house.scheduler.holds = True
    fields = {"prompt": "Hey", "echo": True, "logprobs": 1}
    async with house.stream(PATH, **fields) as events:
        first = await house.scheduler.submitted()
        assert not first.resubmitted
        house.scheduler.run(first.request_id, "ab")
        told = [await events.next(), await events.next()]
        scheduler = await restart(house)
        again = await scheduler.submitted()
        places = [places_of(token_id, 3 + index, 1) for index, token_id in enumerate(b"ab")]
        assert list(again.generated[0].logprobs) == places
        assert len(again.prompt_logprobs) == 2
        assert again.resubmitted, "so no queue limit refuses it"
        scheduler.run(first.request_id, "cd")
        scheduler.finish(first.request_id)
        told += await events.rest()
    assert text_of(told) == "Heyabcd"
    tokens = [
        t for e in told[:-1] for t in (e["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert "".join(tokens) == "Heyabcd"


async def test_a_request_that_fails_owes_no_logprobs(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hey", echo=True, logprobs=0) as events:
        submit = await house.scheduler.submitted()
        house.scheduler.finish(submit.request_id, FinishReason.ERROR, error="NaN logits")
        told = await events.rest()
    assert told[-2]["error"]["message"] == "NaN logits"


async def test_tokens_without_the_logprobs_asked_for_are_an_error(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hey", logprobs=0) as events:
        submit = await house.scheduler.submitted()
        house.scheduler.send(Tokens((TokenRun(submit.request_id, 0, 0, (65,)),)))
        told = await events.rest()
        gone = CancelReason.CLIENT_GONE
        await house.scheduler.until(lambda: bool(house.scheduler.cancels(gone)))
        assert house.scheduler.cancels(gone) == [submit.request_id], "it need not go on"
    assert told[-2]["error"]["code"] == "internal_error"
    assert told[-1] == "[DONE]"


def test_nothing_of_a_prompt_is_taken_before_its_logprobs() -> None:
    telling = Telling(call_of(logprobs=0, echo=True))
    (stream,) = telling.streams
    usage = Usage(2, 0)
    stream.ended(Finished(RequestId("cmpl-1-0"), 0, FinishReason.LENGTH, 0, usage))
    assert stream.take() == []
    assert not stream.is_complete
    assert stream.position == StreamPosition(stream.request_id, (0,))
