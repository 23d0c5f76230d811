"""What is made ready for most tokens is what would be made for each: events, and a histogram."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.gateway.answers import Answer
from services.gateway.histogram import TokenHistogram
from services.gateway.text_event import TextEvent
from shared.ids import RequestId

NASTY = ['"', "\\", "\n", "\u2028", "\u0085", '"text":""', '"content":""', "\x00", "ü", "😀"]
TEXTS = st.text() | st.lists(st.sampled_from(NASTY)).map("".join)


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_a_text_event_is_the_answers_own_to_the_byte(endpoint):
    @given(TEXTS, TEXTS, st.integers(1, 130), st.sampled_from([{}, {"usage": None}]))
    def is_the_same(text, model, num_choices, extras):
        answer = Answer(endpoint, RequestId("cmpl-1"), model, 7)
        positions = [str(index) for index in range(num_choices)]
        index = num_choices - 1
        whole = answer.chunk((answer.text(index, text),), **extras)
        told = TextEvent(answer, index, extras).of(text, positions)
        assert told == answer.event(whole, positions)

    is_the_same()


@given(st.lists(st.floats(0, 100)))
def test_a_token_histogram_is_shown_as_any_other(values):
    bounds = (0.001, 0.25, 1.0, 80.0)
    ours, others = CollectorRegistry(), CollectorRegistry()
    told = TokenHistogram("seconds", "what", bounds, ours)
    other = Histogram("seconds", "what", buckets=bounds, registry=others)
    for value in values:
        told.observe(value)
        other.observe(value)
    shown = generate_latest(others).decode().partition("# HELP seconds_created")[0]
    assert generate_latest(ours).decode() == shown
