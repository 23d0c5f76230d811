"""What is told fits into messages: bounds that hold on the wire, and a door that knows them."""

from dataclasses import replace

import pytest

from services.scheduler.core import intake, streams, wire_size
from services.scheduler.core.events import Gateway
from services.scheduler.core.streams import Outbox
from services.scheduler.core.wire_size import OTHER_BYTES, prompt_bytes, run_bytes, token_bytes
from shared import codec
from shared.errors import ErrorCode
from shared.messages import (
    Attached,
    AttachedSequence,
    GeneratedSequence,
    PositionLogprobs,
    Submit,
    TokenRun,
    Tokens,
)
from shared.sampling import MAX_LOGPROBS, DrawParams, SamplingParams

WIDEST = PositionLogprobs(-1.5, 2**31, (2**31 - 1,) * MAX_LOGPROBS, (-1.5,) * MAX_LOGPROBS)
BARE = PositionLogprobs(-1.5, 2**31)


def size(message):
    return len(codec.encode(message))


@pytest.mark.parametrize("place", [WIDEST, BARE], ids=["widest", "bare"])
@pytest.mark.parametrize(("num_prompt", "n", "num_tokens"), [(2, 1, 0), (500, 3, 70), (9, 128, 9)])
def test_all_of_a_request_is_no_longer_than_its_bounds_say(place, num_prompt, n, num_tokens):
    num_top = len(place.top)
    wish = SamplingParams(
        DrawParams(
            logit_bias=tuple((at, 1.5) for at in range(1024)),
            allowed_token_ids=(1,) * 1024,
            bad_words=((1,) * 32,) * 256,
        ),
        n=n, logprobs=num_top, prompt_logprobs=num_top, stop_token_ids=(1,) * 256,
    )  # fmt: skip
    answers = [((7,) * num_tokens, (place,) * num_tokens)] * n
    scores = (place,) * (num_prompt - 1)
    generated = tuple(GeneratedSequence(ids, None, logprobs) for ids, logprobs in answers)
    submit = Submit(
        "cmpl-" + "é" * 500, (9,) * num_prompt, wish, generated, cache_salt="s" * 600,
        context=b"c" * 700, key_hash=b"k" * 32, prompt_logprobs=scores,
    )  # fmt: skip
    attached = Attached(
        replace(submit, generated=(), prompt_logprobs=()),
        tuple(AttachedSequence(ids, logprobs) for ids, logprobs in answers),
        prompt_logprobs=scores,
    )  # fmt: skip
    bound = prompt_bytes(submit) + num_tokens * token_bytes(submit)
    assert bound - OTHER_BYTES < 1.1 * size(submit)
    assert max(size(submit), size(attached)) <= bound
    run = TokenRun(submit.request_id, 0, 0, *answers[0], scores)
    assert size(Tokens((run,))) <= run_bytes(run)
    assert wire_size.MOST_BYTES == codec.MAX_MESSAGE_BYTES


@pytest.fixture
def narrow(monkeypatch):
    """Messages that hold little beside their wishes."""

    def narrow(num_bytes):
        monkeypatch.setattr(intake, "MOST_BYTES", OTHER_BYTES + num_bytes)

    return narrow


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"prompt": 60, "max_tokens": 0, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": 5, "max_tokens": 60, "logprobs": 20}, "logprobs"),
        ({"prompt": 5, "max_tokens": 200, "n": 30}, "max_tokens"),
    ],
)
def test_what_could_never_be_told_is_refused(build, narrow, params, field):
    narrow(16_000)
    house = build(num_blocks=2000)
    house.submit("A", **params)
    refusal = house.stream("A").refused
    assert (refusal.code, refusal.param, house.plans) == (ErrorCode.INVALID, field, [])
    assert "one message has" in refusal.message
    house.submit("B", prompt=40, max_tokens=12, prompt_logprobs=20, logprobs=2)
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_a_defaulted_max_tokens_is_lowered_to_what_can_be_told(build, narrow):
    narrow(8_000)
    house = build(num_blocks=100)
    house.submit("A", prompt=5, max_tokens=None, logprobs=20, ignore_eos=True)
    most = house.stream("A").max_tokens
    bound = prompt_bytes(house.submits["A"]) + most * token_bytes(house.submits["A"])
    assert 0 <= OTHER_BYTES + 8_000 - bound < token_bytes(house.submits["A"])
    house.run()
    assert len(house.tokens("A")) == most


def test_long_runs_share_messages_only_as_far_as_they_fit(monkeypatch):
    monkeypatch.setattr(streams, "LONG_BYTES", 1_000)
    outbox = Outbox()
    short = TokenRun("r", 0, 3, (7,))
    medium = TokenRun("s", 0, 0, (7,), (WIDEST,))
    longer = TokenRun("t", 0, 0, (7,) * 4, (WIDEST,) * 4)
    for run in (medium, medium, medium, longer, medium):
        outbox.add_run(Gateway(b"g"), short)
        outbox.add_long_run(Gateway(b"g"), run)
    outbox.add_long_run(Gateway(b"h"), longer)
    replies = outbox.drain()
    assert [reply.message.items for reply in replies if reply.gateway == b"g"] == [
        (short, medium, short, medium, short), (medium, short), (longer,), (short, medium),
    ]  # fmt: skip
    assert [reply.message.items for reply in replies if reply.gateway == b"h"] == [(longer,)]
    assert outbox.drain() == []


def test_a_prompts_scores_are_a_long_run(build, monkeypatch):
    monkeypatch.setattr(streams, "LONG_BYTES", 1_000)
    house = build()
    house.submit("A", prompt=9, max_tokens=0, prompt_logprobs=20)
    house.run()
    house.attach("A", "h")
    assert [len(message.items) for message in house.replies(Tokens)] == [1]
    assert house.stream("A", "h").prompt_logprobs == house.scores("A")
