"""Random bodies: a call that can be sent, or an error that names a field; nothing else, ever."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway import openai
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.body_fields import NEUTRAL, REFUSED
from services.gateway.call import Call
from services.gateway.request_body import parse_object
from shared.codec import decode, encode
from shared.errors import RequestError
from shared.ids import RequestId
from shared.messages import TO_SCHEDULER, Submit
from shared.sampling import MAX_N, NO_DRAW, check_sampling

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=3)}) | ANYTHING,
    max_size=3,
)
PROMPTS = st.recursive(st.text(max_size=3) | st.integers(), st.lists, max_leaves=5)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", 5]),
            "content": st.text(max_size=3) | PARTS,
        },
        optional={"name": ANYTHING},
    ),
    max_size=3,
)
NAMES = st.sampled_from(
    sorted({*NEUTRAL, *REFUSED, *CompletionBody.model_fields, *ChatBody.model_fields, "strange"})
)
FIELDS = st.dictionaries(NAMES, ANYTHING | SCALARS, max_size=3)
OF_BEAMS = st.fixed_dictionaries(
    {"use_beam_search": st.just(True)},
    optional={
        "n": st.integers(-1, 130) | SCALARS,
        "length_penalty": st.floats(-11, 11) | ANYTHING,
        "early_stopping": st.sampled_from([True, False, "never", "Never", 0, 1, 1.0]) | ANYTHING,
        "temperature": st.sampled_from([0, 0.0, -0.0, 1, 1e-300]) | ANYTHING,
        "stop": st.sampled_from([[], "", "x", ["x"]]) | ANYTHING,
        "best_of": st.integers(-1, 130) | ANYTHING,
        "max_tokens": st.integers(-1, 3) | ANYTHING,
        "top_k": st.sampled_from([-1, 0, 1]) | ANYTHING,
        "deadline_s": st.floats(allow_nan=False, allow_infinity=False) | ANYTHING,
        "priority": st.integers() | ANYTHING,
    },
)


@settings(max_examples=500, deadline=None)
@given(fields=FIELDS, prompt=PROMPTS | ANYTHING)
def test_any_completion_is_a_call_or_a_named_error(fields: dict[str, Any], prompt: Any) -> None:
    check(openai.parse_completion, {"prompt": prompt} | fields)


@settings(max_examples=500, deadline=None)
@given(fields=FIELDS, messages=MESSAGES | ANYTHING)
def test_any_chat_is_a_call_or_a_named_error(fields: dict[str, Any], messages: Any) -> None:
    check(openai.parse_chat, {"messages": messages} | fields)


@settings(max_examples=200, deadline=None)
@given(fields=OF_BEAMS | st.builds(lambda *parts: parts[0] | parts[1], OF_BEAMS, FIELDS))
def test_what_is_taken_of_beams_draws_nothing_and_has_a_width(fields: dict[str, Any]) -> None:
    fields = {"prompt": "Hi"} | fields
    check(openai.parse_completion, fields)
    outcome = outcome_of(openai.parse_completion, fields)
    if isinstance(outcome, Call) and fields["use_beam_search"]:
        sampling = outcome.sampling
        assert sampling.draw == NO_DRAW
        assert 1 <= sampling.n <= MAX_N
        assert sampling.n == (fields.get("n") or 1)
        assert sampling.max_tokens != 0
        assert (outcome.stop, outcome.best) == ((), None)
        assert outcome.deadline_s is None or 0 < outcome.deadline_s <= 86_400


def check(parse: Any, fields: dict[str, Any]) -> None:
    outcome = outcome_of(parse, fields)
    if isinstance(outcome, RequestError):
        assert outcome.param is not None
        assert len(outcome.message) < 250
        assert "is not what this field takes" not in outcome.message, "pydantic's kind has words"
    else:
        submit = Submit(
            RequestId("cmpl-x"),
            (1,),
            outcome.sampling,
            priority=outcome.priority,
            deadline_s=outcome.deadline_s,
        )
        assert decode(encode(submit), TO_SCHEDULER) == submit


def outcome_of(parse: Any, fields: dict[str, Any]) -> Call | RequestError:
    try:
        call: Call = parse(parse_object(json.dumps(fields).encode()))
        check_sampling(call.sampling, 512)
    except RequestError as error:
        return error
    return call


@settings(max_examples=500, deadline=None)
@given(body=st.binary(max_size=60) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_an_error_that_says_why(body: bytes) -> None:
    try:
        outcome: dict[str, Any] | str = parse_object(body)
    except RequestError as error:
        outcome = error.message
    assert isinstance(outcome, dict) or outcome
