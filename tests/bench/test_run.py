"""Whole runs against servers that behave, and servers that do not."""

import asyncio
import os
import signal

import pytest

from services.bench.build import build
from services.bench.outcome import Failed, judge
from services.bench.run import run
from services.bench.settings import load_settings
from services.bench.tokens import load_tokens
from shared.errors import StartError
from tests.bench.fake_server import CUT, crlf, serving, split, whole
from tests.bench.stamped import said

TOKENS = load_tokens("toy")


async def bench(server, *flags):
    """(run, outcomes of what ended) of a bench with short random prompts, or as `flags` say."""
    settings = load_settings(
        [
            "--base-url", server.url, "--tokenizer", "toy", "--random-input-len", "8",
            "--random-output-len", "3", *flags,
        ]
    )  # fmt: skip
    plans = build(settings, settings.count, settings.seed, TOKENS)
    warm_up = build(settings, settings.warmups, 1, TOKENS) if settings.warmups else []
    ran = await run(settings, plans, warm_up)
    outcomes = [
        judge(plan, recording, TOKENS.count)
        for plan, recording in zip(plans, ran.recordings, strict=True)
        if recording.end_s is not None
    ]
    return ran, outcomes


def kinds(outcomes):
    return [outcome.kind if isinstance(outcome, Failed) else "done" for outcome in outcomes]


async def test_every_request_is_asked_and_counted_once():
    async with serving() as server:
        ran, outcomes = await bench(server, "--num-prompts", "7", "--max-concurrency", "3")
    assert kinds(outcomes) == ["done"] * 7
    assert [outcome.output_tokens for outcome in outcomes] == [3] * 7
    assert all(0 < outcome.ttft_s <= outcome.e2el_s <= ran.duration_s for outcome in outcomes)
    assert ran.model == "fake"
    assert len({body["prompt"] for _, body in server.asked}) == 7
    assert {path for path, _ in server.asked} == {"/v1/completions"}
    assert server.most_open <= 3


async def test_a_body_says_what_was_asked_for():
    async with serving(lambda body: whole(2, body.get("n", 1))) as server:
        _, outcomes = await bench(
            server, "--workload", "C", "--num-prompts", "1", "--model", "mine", "--top-p", "0.5",
            "--extra-body", '{"min_tokens": "$MAX", "top_p": 0.25, "stream_options": null}',
            "--ignore-eos", "--num-warmups", "1",
        )  # fmt: skip
    (_, warm_up), (path, body) = server.asked
    assert warm_up["max_tokens"] == 16
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body.pop("messages")] == ["user"]
    assert body == {
        "model": "mine",
        "stream": True,
        "max_tokens": 64,
        "temperature": 0.8,
        "n": 4,
        "seed": 1000,
        "ignore_eos": True,
        "min_tokens": 64,
        "top_p": 0.25,
    }
    assert outcomes[0].output_tokens == 8


@pytest.mark.parametrize(
    ("extra", "asked"),
    [
        ('{"max_tokens": 5, "n": 2, "min_tokens": "$MAX"}',
         {"max_tokens": 5, "n": 2, "min_tokens": 5}),
        ('{"max_tokens": null, "max_completion_tokens": 5, "n": 2}',
         {"max_completion_tokens": 5, "n": 2}),
        ('{"max_tokens": null, "max_completion_tokens": "$MAX", "n": null}',
         {"max_completion_tokens": 64}),
    ],
)  # fmt: skip
async def test_an_answer_is_judged_by_what_the_extra_body_asked(extra, asked):
    max_tokens = asked.get("max_tokens") or asked["max_completion_tokens"]
    num_choices = asked.get("n", 1)
    answers = iter([whole(max_tokens, num_choices), whole(max_tokens)])
    async with serving(lambda _: next(answers)) as server:
        _, (outcome, other) = await bench(
            server, "--workload", "C", "--num-prompts", "2", "--num-warmups", "0",
            "--concurrency", "1", "--extra-body", extra,
        )  # fmt: skip
    assert outcome.num_choices == num_choices
    assert outcome.is_of_asked_length
    assert kinds([other]) == ["done" if num_choices == 1 else "choices missing"]
    names = ("max_tokens", "max_completion_tokens", "n", "min_tokens")
    assert {name: server.asked[0][1][name] for name in names if name in server.asked[0][1]} == asked


async def test_keys_and_headers_are_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    async with serving() as server:
        await bench(server, "--num-prompts", "1", "--header", "X-A=1", "X-B=2=3")
        assert all(
            (headers["Authorization"], headers["X-A"], headers["X-B"])
            == ("Bearer from-the-environment", "1", "2=3")
            for headers in server.headers
        )
        server.headers.clear()
        await bench(server, "--num-prompts", "1", "--api-key", "given")
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer given"] * 2


@pytest.mark.parametrize(
    "script",
    [
        [b": ping\n\n", *whole(), b": bye\n\n"],
        crlf(whole()),
        *([*split(whole(), size)] for size in (1, 7, 100)),
        [*whole()[:-1], b"data: [DONE]"],
    ],
)
async def test_streams_may_look_in_many_ways(script):
    async with serving(lambda _: script) as server:
        _, outcomes = await bench(server, "--num-prompts", "2")
    assert kinds(outcomes) == ["done"] * 2
    assert {outcome.texts for outcome in outcomes} == {("xxx",)}


async def test_a_server_without_usage_is_counted_by_the_tokenizer():
    async with serving(lambda _: whole(usage=False)) as server:
        _, (outcome,) = await bench(server, "--num-prompts", "1")
    assert (outcome.counted_by, outcome.output_tokens, outcome.prompt_tokens) == ("tokenizer", 3, 8)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([said("a"), CUT], "died mid-stream"),
        ([CUT], "connection lost"),
        ([said("a"), {"error": {"message": "boom"}}, "[DONE]"], "error in the stream"),
        (whole()[:-1], "no [DONE]"),
        ((503, '{"error": {"message": "not yet"}}'), "HTTP 503"),
        ((200, '{"choices": [{"text": "all at once"}]}'), "no stream"),
    ],
)
async def test_one_bad_answer_is_one_failure(script, kind):
    answers = iter([whole(), script, whole()])
    async with serving(lambda _: next(answers)) as server:
        _, outcomes = await bench(server, "--num-prompts", "3", "--max-concurrency", "1")
    assert kinds(outcomes) == ["done", kind, "done"]


async def test_an_answer_that_takes_too_long_is_a_failure():
    never = asyncio.Event()
    async with serving(lambda _: [said("a"), never]) as server:
        _, outcomes = await bench(server, "--num-prompts", "1", "--request-timeout", "0.2")
        never.set()
    assert kinds(outcomes) == ["timeout"]


async def test_a_server_that_is_not_there_fails_every_request():
    async with serving() as server:
        pass
    _, outcomes = await bench(server, "--num-prompts", "2", "--model", "x")
    assert kinds(outcomes) == ["no connection"] * 2
    with pytest.raises(StartError, match=r"nothing listens at http://.*--base-url"):
        await bench(server, "--num-prompts", "2")


async def test_an_interrupt_keeps_what_there_is():
    never = asyncio.Event()
    scripts = iter([whole(), [said("a"), never]])
    async with serving(lambda _: next(scripts)) as server:

        async def interrupt():
            await server.held.wait()
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = asyncio.create_task(interrupt())
        ran, outcomes = await bench(server, "--num-prompts", "5", "--max-concurrency", "1")
        await interrupting
        never.set()
    assert ran.was_interrupted
    assert kinds(outcomes) == ["done"]
    assert len(server.asked) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_after_a_run_a_signal_means_what_it_meant_before(number):
    """Or a contest ended by SIGTERM between two loads would leave its servers behind."""
    heard = []

    def hear(number, _frame):
        heard.append(number)

    before = signal.signal(number, hear)
    try:
        async with serving() as server:
            await bench(server, "--num-prompts", "1")
        assert signal.getsignal(number) is hear
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)  # a turn in which the handler runs
    finally:
        signal.signal(number, before)
    assert heard == [number]


async def test_a_failed_warm_up_is_said_and_not_counted(capsys):
    answers = iter([(500, "cold"), whole()])
    async with serving(lambda _: next(answers)) as server:
        _, outcomes = await bench(server, "--num-prompts", "1", "--num-warmups", "1")
    assert kinds(outcomes) == ["done"]
    assert "warm-up failed: HTTP 500: cold" in capsys.readouterr().err
