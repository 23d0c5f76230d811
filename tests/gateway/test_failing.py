"""Errors from the scheduler, and bugs of ours: a status, or an event and [DONE]."""

import math
from pathlib import Path

import pytest

from services.gateway import failures
from shared.errors import ErrorCode, NeverFits
from shared.messages import CancelReason, Refused, Tokens
from shared.sampling import FinishReason
from tests.gateway.house import Held, House, held_stream, open_house, text_of
from tests.gateway.scripted_scheduler import Script
from tests.gateway.tiny_models import gguf

PATH = "/v1/completions"


def fail_with(held: Held, *texts: str) -> None:
    """All texts come in one message, and with them the first choice's end by an error."""
    for index, text in enumerate(texts):
        held.scheduler.run(held.request_id, text, index, lost=True)
    held.scheduler.finish(held.request_id, FinishReason.ERROR, error="NaN logits")
    logs = held.scheduler.logs[held.request_id]
    held.scheduler.send(Tokens(tuple(log.run(0) for log in logs[: len(texts)])))


async def test_an_error_before_the_first_byte_is_a_status(house: House) -> None:
    refused = Refused(
        "", ErrorCode.NEVER_FITS, "needs 9 blocks of 16 tokens; the pool has 4", "max_tokens"
    )
    house.scheduler.script.append(Script(refusal=refused))
    status, told = await house.post("/v1/completions", prompt="Hi", stream=True)
    assert status == 400
    assert told["error"]["code"] == "request_too_large"
    assert told["error"]["param"] == "max_tokens"
    assert "9 blocks" in told["error"]["message"]


async def test_too_many_answers_are_lowered_by_the_name_the_client_gave(house: House) -> None:
    for fields, advice in (({"n": 4}, "lower n,"), ({"best_of": 4}, "lower best_of,")):
        refused = Refused("", ErrorCode.NEVER_FITS, NeverFits(9, 4, 16, 0, 4).message, "max_tokens")
        house.scheduler.script.append(Script(refusal=refused))
        _, told = await house.post("/v1/completions", prompt="Hi", **fields)
        assert advice in told["error"]["message"]


async def test_a_scheduler_without_room_means_503_and_when_to_retry(house: House) -> None:
    refused = Refused("", ErrorCode.UNAVAILABLE, "the executor is down", None, 7.0)
    house.scheduler.script.append(Script(refusal=refused))
    async with house.http.post(house.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "7"


async def test_an_error_inside_a_stream_is_an_event_and_then_done(house: House) -> None:
    """R8's kind: never a bare end."""
    script = Script(["abc"], FinishReason.ERROR, error="NaN logits at step 7")
    house.scheduler.script.append(script)
    async with house.stream("/v1/completions", prompt="Hi") as events:
        told = await events.rest()
    assert told[-1] == "[DONE]"
    assert told[-2]["error"]["message"] == "NaN logits at step 7"


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["cd"]}, {"logprobs": 0, "stop": ["cd"]}, {"echo": True},
     {"echo": True, "logprobs": 1}, {"n": 2}],
)  # fmt: skip
async def test_tokens_that_come_with_an_error_are_told_before_it(house, fields) -> None:
    """Whatever was held back is told, too: no stop string comes any more."""
    async with held_stream(house, **fields) as held:
        fail_with(held, "abc")
        told = await held.events.rest()
    before = "Hi" if "echo" in fields else ""
    assert text_of(told[:-2]) == before + "abc"
    assert (told[-2]["error"]["message"], told[-1]) == ("NaN logits", "[DONE]")


async def test_a_failed_choice_takes_nothing_from_the_others(house: House) -> None:
    async with held_stream(house, n=2) as held:
        fail_with(held, "abc", "xyz")
        told = await held.events.rest()
    texts = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in told[:-2]}
    assert texts == {0: "abc", 1: "xyz"}
    assert told[-2]["error"]["message"] == "NaN logits"


async def test_what_failed_before_its_prompt_was_told_tells_nothing(house: House) -> None:
    """With echo and logprobs a text without its prompt would be wrong."""
    async with held_stream(house, n=2, echo=True, logprobs=1) as held:
        held.scheduler.run(held.request_id, "xyz", 1)
        held.scheduler.finish(held.request_id, FinishReason.ERROR, error="NaN logits")
        told = await held.events.rest()
    assert text_of(told) == ""
    assert told[0]["error"]["message"] == "NaN logits"


async def test_text_that_waited_for_more_is_told_before_an_error(tmp_path: Path) -> None:
    async with open_house(tmp_path, stream_interval=8) as house, held_stream(house) as held:
        held.run("ab")
        first = await held.events.next()
        held.run("cd")
        await held.is_listed_at(4)
        held.scheduler.send(Refused(held.request_id, ErrorCode.DEADLINE, "too late"))
        rest = await held.events.rest()
    assert (text_of([first]), text_of(rest)) == ("ab", "cd")
    assert (rest[-2]["error"]["code"], rest[-1]) == ("deadline_exceeded", "[DONE]")


async def test_an_error_without_a_stream_is_a_500(house: House) -> None:
    house.scheduler.script.append(Script(["abc"], FinishReason.ERROR, error="NaN logits"))
    status, told = await house.post("/v1/completions", prompt="Hi")
    assert (status, told["error"]["message"]) == (500, "NaN logits")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_of_a_refusal_has_a_status(code: ErrorCode) -> None:
    failure = failures.of_refusal(Refused("", code, "no", retry_after_s=7.0))
    assert 400 <= failure.status < 600
    assert failure.code == code.value
    assert failure.headers["Retry-After"] == "7", "whoever refused it says when"
    assert ("x-should-retry" in failure.headers) == (code is ErrorCode.DEADLINE)
    untimed = failures.of_refusal(Refused("", code, "no"))
    assert ("Retry-After" in untimed.headers) == (untimed.status in (429, 503))


def test_what_is_refused_only_for_now_is_no_400() -> None:
    """OpenAI's clients try a 429 again, after the time it says; a 400 never."""
    for code in (ErrorCode.PREFIX_BUDGET, ErrorCode.NEVER_FITS):
        assert failures.of_refusal(Refused("", code, "no", retry_after_s=5.0)).status == 429
        assert failures.of_refusal(Refused("", code, "no")).status == 400


async def test_a_full_queue_is_429_and_says_when_to_retry(house: House) -> None:
    full = Refused("", ErrorCode.QUEUE_FULL, "256 requests wait already", None, 2.0)
    house.scheduler.script.append(Script(refusal=full))
    async with house.http.post(house.url + PATH, json={"prompt": "x"}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "2"
        assert (await response.json())["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("wait_s", "told"),
    [(math.nan, "1"), (math.inf, "3600"), (-math.inf, "1"), (1e300, "3600"), (0.0, "1"),
     (-5.0, "1"), (2.4, "2"), (None, "5")],
)  # fmt: skip
def test_any_time_to_wait_makes_a_header(wait_s, told) -> None:
    failure = failures.of_refusal(Refused("", ErrorCode.QUEUE_FULL, "no", retry_after_s=wait_s))
    assert failure.headers == {"Retry-After": told}


async def test_of_several_prompts_a_full_queue_says_to_send_fewer(house: House) -> None:
    full = Refused("", ErrorCode.QUEUE_FULL, "2 requests wait already; try again later", None, 2.0)
    house.scheduler.script.extend([Script(refusal=full)] * 3)
    for prompt, says_so in ((["a", "b"], True), ("a", False)):
        status, told = await house.post(PATH, prompt=prompt)
        assert status == 429
        assert ("send fewer than 2 prompts at once" in told["error"]["message"]) == says_so


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 500, "internal_error"),
        (ErrorCode.INTERNAL, 500, "internal_error"),
        (ErrorCode.DEADLINE, 408, "deadline_exceeded"),
        (ErrorCode.CONTEXT_LENGTH, 400, "context_length_exceeded"),
    ],
)
async def test_the_code_of_an_error_at_the_end_is_told(house, code, status, said) -> None:
    script = Script(["abc"], FinishReason.ERROR, error="why it ended", code=code)
    house.scheduler.script.extend([script, script])
    async with house.http.post(house.url + PATH, json={"prompt": "Hi"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, said)
        try_again = response.headers.get("x-should-retry")
        assert try_again == ("false" if code is ErrorCode.DEADLINE else None)
    async with house.stream(PATH, prompt="Hi") as events:
        event, done = (await events.rest())[-2:]
    assert (event["error"]["code"], event["error"]["message"]) == (said, "why it ended")
    assert done == "[DONE]"


async def test_a_bug_of_ours_in_the_middle_of_a_stream_is_told_too(tmp_path: Path) -> None:
    """A negative token id is none that the tokenizer bears."""
    options = {"model": "tiny"}
    async with open_house(tmp_path, model=str(gguf(tmp_path)), scheduler_options=options) as house:
        gone = 'http_requests_total{path="/v1/completions",status="499"}'
        before = await house.metric(gone)
        async with held_stream(house, prompt="ab") as held:
            await held.events.frame()
            held.run((-5,))
            told = await held.events.rest()
        assert told[-2]["error"]["code"] == "internal_error"
        assert told[-1] == "[DONE]"
        await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))
        assert await house.metric(gone) == before


async def test_a_bug_of_ours_takes_nothing_from_what_came_before_it(tmp_path: Path) -> None:
    options = {"model": "tiny"}
    async with (
        open_house(tmp_path, model=str(gguf(tmp_path)), scheduler_options=options) as house,
        held_stream(house, prompt="ab", n=2) as held,
    ):
        whole, broken = held.scheduler.logs[held.request_id]
        whole.token_ids, broken.token_ids = list(held.submit.prompt), [-5]
        held.scheduler.send(Tokens((whole.run(0), broken.run(0))))
        told = await held.events.rest()
    assert text_of(told[:-2]).strip() == "ab"
    assert told[-2]["error"]["code"] == "internal_error"


async def test_only_requests_that_finished_have_a_latency(house: House) -> None:
    count = "e2e_request_latency_seconds_count"
    before = await house.metric(count)
    broken = Script(["abc"], FinishReason.ERROR, error="NaN logits")
    house.scheduler.script.extend([broken, broken, Script(), Script()])
    await house.post(PATH, prompt="Hi")
    async with house.stream(PATH, prompt="Hi") as events:
        await events.rest()
    assert await house.metric(count) == before
    await house.complete()
    async with house.stream(PATH, prompt="Hi") as events:
        await events.rest()
    assert await house.metric(count) == before + 2


async def test_error_events_are_counted_by_their_code(held: Held) -> None:
    sample = 'requests_rejected_total{reason="stream_moved"}'
    before = await held.house.metric(sample)
    held.scheduler.send(Refused(held.request_id, ErrorCode.MOVED, "taken over"))
    await held.events.rest()
    assert await held.house.metric(sample) == before + 1
