"""The arithmetic of one request, on given times; and everything that makes it a failure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.outcome import Failed, judge
from services.bench.recording import Recording
from tests.bench.stamped import DONE, judged, plan, recording, said, used


def test_one_answer():
    outcome = judged(
        (10.5, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        (11.0, said("a")),
        (11.25, said("b")),
        (11.75, said("c")),
        (12.75, said("d", finish="length")),
        (13.0, used(4)),
        (13.0, DONE),
        start=10.0,
        end=14.0,
    )
    assert outcome.ttft_s == 1.0  # the empty delta is no token
    assert outcome.itls_s == (0.25, 0.5, 1.0)
    assert outcome.tpots_s == (1.75 / 3,)
    assert outcome.e2el_s == 4.0
    assert outcome.normalized_s == 1.0
    assert (outcome.prompt_tokens, outcome.output_tokens) == (10, 4)
    assert outcome.counted_by == "usage"
    assert outcome.is_of_asked_length
    assert outcome.texts == ("abcd",)


def test_several_tokens_in_an_event():
    outcome = judged((1.0, said("ab")), (3.0, said("cd")), (3.0, used(5)), (3.0, DONE))
    assert outcome.itls_s == (2.0,)
    assert outcome.tpots_s == (0.5,)
    assert not outcome.is_of_asked_length


def test_an_answer_in_one_event_has_no_time_between_tokens():
    outcome = judged((1.0, said("abcd")), (1.0, used(4)), (1.0, DONE))
    assert (outcome.tpots_s, outcome.itls_s) == ((), ())
    assert outcome.slowest_tpot_s == 0


def test_without_usage_the_tokenizer_counts():
    outcome = judged((1.0, said("ab")), (2.0, said("cde")), (2.0, DONE))
    assert (outcome.output_tokens, outcome.prompt_tokens) == (5, 5)
    assert outcome.counted_by == "tokenizer"
    assert outcome.tpots_s == (0.25,)


def test_the_last_usage_counts():
    first = said("a") | {"usage": {"completion_tokens": 1, "prompt_tokens": 7}}
    last = said("b") | {"usage": {"completion_tokens": 2, "prompt_tokens": 7}}
    outcome = judged((1.0, first), (2.0, last), (2.0, DONE))
    assert (outcome.output_tokens, outcome.prompt_tokens) == (2, 7)


def test_each_of_several_answers_has_its_own_pace():
    outcome = judged(
        (1.0, said("a", 1)),
        (2.0, said("b", 0)),
        (2.0, said("c", 1)),
        (5.0, said("d", 0)),
        (5.0, said("e", 0)),
        (5.0, said("f", 1)),
        (6.0, used(6)),
        (6.0, DONE),
        num_choices=2,
        max_tokens=3,
    )
    assert outcome.ttft_s == 1.0
    assert outcome.itls_s == (3.0, 0.0, 1.0, 3.0)
    assert outcome.tpots_s == (1.5, 2.0)
    assert outcome.slowest_tpot_s == 2.0
    assert outcome.texts == ("bde", "acf")
    assert outcome.normalized_s == 2.0  # 6 s over 3 tokens, not over 6
    assert outcome.is_of_asked_length


def test_usage_of_one_answer_of_several_is_not_taken_for_all():
    outcome = judged(
        *((float(time), said("x", index)) for time in (1, 2, 3) for index in (0, 1)),
        (3.0, used(3)),
        (3.0, DONE),
        num_choices=2,
    )
    assert outcome.output_tokens == 6


def test_completions_have_text_and_reasoning_counts():
    text = {"choices": [{"index": 0, "text": "a"}]}
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "b", "content": None}}]}
    assert judged((1.0, text), (2.0, thought), (2.0, DONE)).texts == ("ab",)


KEYS = st.sampled_from(
    ["choices", "index", "delta", "text", "content", "usage", "completion_tokens", "error",
     "finish_reason", "message", "object", "prompt_tokens", "reasoning"]
)  # fmt: skip

WHOLE = ((1.0, said("a", finish="stop")), (1.0, used(1)))


@pytest.mark.parametrize(
    ("failed", "kind", "story"),
    [
        (judged(*WHOLE), "no [DONE]", "ended without"),
        (judged((1.0, {"error": {"message": "boom"}}), (1.0, DONE)), "error in the stream", "boom"),
        (
            judged(*WHOLE, (1.0, {"object": "error", "message": "old style"}), (1.0, DONE)),
            "error in the stream",
            "old style",
        ),
        (judged((1.0, said("a", finish="abort")), (1.0, DONE)), "finish reason abort", "gave up"),
        (judged((1.0, said("")), (1.0, DONE)), "no text", "no text"),
        (judged((1.0, DONE)), "no text", "try --ignore-eos"),
        (judged(*WHOLE, (1.0, DONE), num_choices=2), "choices missing", "n=2 asked, 1 came"),
        (judged((1.0, b"data: {oops\n\n"), (1.0, DONE)), "no JSON", "oops"),
        (judged((1.0, b"data: 7\n\n"), (1.0, DONE)), "no JSON", "7"),
        (judged((1.0, b'{"choices": []}')), "no stream", "event-stream: {"),
        (judged(), "no stream", ""),
        (judged((1.0, b'{"error": {"message": "busy"}}'), status=429), "HTTP 429", "busy"),
        (judged((1.0, b"<html>"), status=502), "HTTP 502", "<html>"),
        (judged(status=500), "HTTP 500", ""),
        (judged(*WHOLE, failure=("died mid-stream", "reset")), "died mid-stream", "reset"),
        (judged(status=None, failure=("no connection", "refused")), "no connection", "refused"),
    ],
)
def test_what_is_not_whole_is_a_failure(failed, kind, story):
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert story in failed.story


def test_the_first_failure_is_told():
    failed = judged((1.0, {"error": "first"}), (2.0, {"error": "second"}))
    assert failed.story == "first"


@pytest.mark.parametrize(
    "part", [{"index": None, "text": "a"}, {"text": "a", "delta": None}, {"text": "a"}]
)
def test_missing_fields_are_forgiven(part):
    assert judged((1.0, {"choices": [part, "nonsense"]}), (1.0, DONE)).texts == ("a",)
    assert judged((1.0, said("b")), (1.0, {"choices": None}), (1.0, DONE)).texts == ("b",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(st.lists(st.dictionaries(KEYS, JSON, max_size=5), max_size=4))
def test_no_stream_of_json_is_too_odd(events):
    outcome = judged(*((1.0, content) for content in events), (1.0, DONE))
    assert isinstance(outcome, Failed) or outcome.output_tokens >= 0


@given(st.binary(max_size=200).filter(lambda raw: b"[DONE]" not in raw))
def test_no_bytes_are_too_odd(raw):
    assert isinstance(judged((1.0, raw), (1.0, b"\n\n"), (1.0, said("a")), status=200), Failed)


def test_a_recording_that_has_not_ended_is_not_judged():
    with pytest.raises(ValueError, match="not ended"):
        judge(plan(), Recording(start_s=1.0), len)
    assert recording((1.0, DONE)).end_s == 1.0
