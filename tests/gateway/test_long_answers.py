"""Long answers: bounded at the door, made in turns with others, sent in chunks."""

import asyncio
import json
import time
from typing import Any

import pytest

from services.gateway.answer_size import MAX_LOGPROBS_IN_ALL, bounded
from services.gateway.call import Best, Prompt
from services.gateway.json_portions import LongList, Turn, portions
from services.gateway.long_body import json_response
from shared.errors import InvalidField
from shared.messages import Submit
from shared.sampling import SamplingParams
from tests.gateway.house import House, open_house
from tests.gateway.refusals import refused
from tests.gateway.scripted_scheduler import Script
from tests.gateway.telling import Delivery, Telling, call_of, prompt_of

PATH = "/v1/completions"
CHAT = [{"role": "user", "content": "Hi"}]
LONG = "hello wor!" * 200
"""2,000 tokens of the toy."""


# ------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("path", "fields", "param", "count"),
    [
        (PATH, {"prompt": [LONG] * 50, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs",
         50 * 2000 * 21),
        (PATH, {"prompt": [LONG] * 50, "max_tokens": 0, "logprobs": 20, "echo": True}, "logprobs",
         50 * 2000 * 21),
        (PATH, {"prompt": LONG, "n": 27, "max_tokens": 0, "echo": True, "logprobs": 19}, "logprobs",
         27 * 2000 * 20),
        (PATH, {"prompt": "x", "n": 128, "max_tokens": 400, "logprobs": 20}, "logprobs",
         128 * 400 * 21),
        (PATH, {"prompt": ["x"] * 8, "n": 1, "best_of": 128, "max_tokens": 1025}, "best_of",
         8 * 128 * 1025),
        ("/v1/chat/completions", {"messages": CHAT, "n": 128, "logprobs": True, "top_logprobs": 20,
         "max_completion_tokens": 400}, "top_logprobs", 128 * 400 * 21),
    ],
)  # fmt: skip
async def test_more_log_probabilities_than_one_answer_takes(house, path, fields, param, count):
    status, named, _, message = await refused(house, path, fields)
    assert (status, named) == (400, param)
    assert f"{count} log-probabilities" in message
    assert f"at most {MAX_LOGPROBS_IN_ALL}" in message


@pytest.mark.parametrize(("n", "top"), [(1, 20), (128, 20), (128, 0)])
async def test_a_chat_of_no_given_length_gets_as_long_as_there_is_room(house, n, top) -> None:
    fields = {"messages": CHAT, "n": n, "logprobs": True, "top_logprobs": top}
    status, _ = await house.post("/v1/chat/completions", **fields)
    assert status == 200
    max_tokens = (await house.scheduler.submitted()).sampling.max_tokens
    room = MAX_LOGPROBS_IN_ALL // (n * (1 + top))
    assert max_tokens == (None if room >= house.scheduler.max_model_len else room)


def test_the_limit_itself_is_taken() -> None:
    sampling = SamplingParams(n=2, logprobs=0, max_tokens=MAX_LOGPROBS_IN_ALL // 2)
    assert bounded(call_of(n=2, logprobs=0), sampling, [prompt_of("x")], 2**30) is sampling
    more = SamplingParams(n=2, logprobs=0, max_tokens=MAX_LOGPROBS_IN_ALL // 2 + 1)
    with pytest.raises(InvalidField):
        bounded(call_of(n=2, logprobs=0), more, [prompt_of("x")], 2**30)


def test_a_prompts_are_counted_as_often_as_they_are_told() -> None:
    prompt = Prompt((1,) * (MAX_LOGPROBS_IN_ALL // 4), "x")
    sampling = SamplingParams(n=4, max_tokens=1, prompt_logprobs=0)
    completion = call_of(n=4, returns_prompt_logprobs=True)
    assert bounded(completion, sampling, [prompt], 2**30) is sampling
    best = call_of(n=4, returns_prompt_logprobs=True, best=Best(1, hides_logprobs=True))
    assert bounded(best, sampling, [prompt] * 4, 2**30) is sampling
    with pytest.raises(InvalidField, match="prompt_logprobs"):
        bounded(completion, sampling, [prompt, prompt], 2**30)


# ------------------------------------------------------------------ in portions


def test_portions_join_to_the_json_of_the_whole() -> None:
    def of(make: Any) -> Any:
        return {
            "a": make(iter(range(1000))),
            "b": {"c": make([]), "d": [1, 2]},
            "e": "text é",
            "f": make([{"g": make("xyz")}, {}]) if make is list else
            LongList([{"g": make("xyz")}, {}], at_a_time=1),
        }  # fmt: skip

    written = list(portions(of(LongList)))
    assert json.loads("".join(written)) == of(list)
    assert len(written) > 8


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_no_portion_of_a_long_answer_is_long(endpoint: str) -> None:
    """With 20 log-probabilities a token, its whole JSON is megabytes."""
    echo = endpoint == "completion"
    fields = {"echo": echo, "returns_prompt_logprobs": echo}
    prompt, delivery = prompt_of(LONG), Delivery(LONG.encode())
    telling = Telling(call_of(endpoint, 20, **fields), [prompt])
    telling.in_one_piece([delivery])  # its form is right
    told = Telling(call_of(endpoint, 20, **fields), [prompt])
    answer = told.whole([delivery])
    sizes = [len(portion) for portion in answer.portions()]
    assert sum(sizes) > 2**20
    assert max(sizes) < 2**19
    streaming = Telling(call_of(endpoint, 20, echo=echo), [prompt])
    sizes = [len(portion) for portion in streaming.portions([delivery])]
    assert sum(sizes) > 2**20
    assert max(sizes) < 2**19


async def test_a_long_answer_arrives_whole_and_is_no_chunked_one(tmp_path) -> None:
    async with open_house(tmp_path) as house:
        house.scheduler.script.append(Script(["x"]))
        body = {"prompt": LONG, "max_tokens": 1, "prompt_logprobs": 20}
        async with house.http.post(house.url + PATH, json=body) as response:
            raw = await response.read()
            assert int(response.headers["Content-Length"]) == len(raw) > 2**21
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        (choice,) = json.loads(raw)["choices"]
        assert len(choice["prompt_logprobs"]) == 2000
        assert [next(iter(place)) for place in choice["prompt_logprobs"][1:]] == [
            str(token_id) for token_id in LONG.encode()[1:]
        ]


async def test_a_long_echo_is_one_event(house: House) -> None:
    house.scheduler.script.append(Script(["x"]))
    fields = {"prompt": LONG, "max_tokens": 1, "logprobs": 20, "echo": True}
    async with house.http.post(house.url + PATH, json={**fields, "stream": True}) as response:
        raw = (await response.read()).decode()
    first, *_ = [json.loads(e[6:]) for e in raw.split("\n") if e.startswith("data: {")]
    logprobs = first["choices"][0]["logprobs"]
    assert {name: len(column) for name, column in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 2000
    )
    assert logprobs["text_offset"] == list(range(2000))


async def test_others_have_their_turns_while_an_answer_is_made() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow() -> Any:
        for _ in range(20):
            until = time.monotonic() + 0.006
            while time.monotonic() < until:
                pass
            yield "1"

    others = asyncio.create_task(other())
    await json_response(slow())
    others.cancel()
    assert turns >= 20


async def test_a_short_turn_is_not_given_away() -> None:
    happened = []
    asyncio.get_running_loop().call_soon(happened.append, "other")
    turn = Turn()
    turn._ends += 60
    await turn.give()
    assert happened == []


async def test_a_thousand_echoes_open_one_by_one(house: House) -> None:
    prompts = [f"prompt {number}" for number in range(1000)]
    fields = {"prompt": prompts, "max_tokens": 1, "echo": True}
    async with house.stream(PATH, **fields) as events:
        told = await events.rest()
    opened = [event["choices"][0]["text"] for event in told[:1000]]
    assert opened == prompts
    assert len(house.scheduler.of(Submit)) == 1000


# ------------------------------------------------------------------ prompts that fill the context


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
async def test_a_prompt_as_long_as_the_context_may_be_scored(tmp_path, fields) -> None:
    async with open_house(tmp_path, scheduler_options={"max_model_len": 64}) as house:
        house.scheduler.script.append(Script([]))
        answer = await house.complete(prompt="x" * 64, max_tokens=0, **fields)
        assert answer["usage"]["prompt_tokens"] == 64
        status, told = await house.post(PATH, prompt="x" * 65, max_tokens=0, **fields)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        status, told = await house.post(PATH, prompt="x" * 64, max_tokens=1, **fields)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
