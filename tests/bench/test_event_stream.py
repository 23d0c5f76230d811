"""Server-sent events come out the same wherever the chunks were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.event_stream import read_events

STREAM = (
    ": ping\r\n\r\n"
    "id: 1\r\ndata: {\"a\": \"é\"}\r\n\r\n"
    "event: x\ndata:two\ndata: lines\n\n\n"
    "data\r\rretry: 5\rdata: [DONE]\r\r"
).encode()  # fmt: skip
EVENTS = ['{"a": "é"}'.encode(), b"two\nlines", b"", b"[DONE]"]


def whole(raw):
    return [data for _, data in read_events([(0.0, raw)])]


def test_comments_and_other_fields_are_no_events():
    assert whole(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_chunk_borders_do_not_matter(cuts):
    cuts = [0, *sorted(cuts), len(STREAM)]
    chunks = [(float(i), STREAM[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    events = read_events(chunks)
    assert [data for _, data in events] == EVENTS
    times = [time for time, _ in events]
    assert times == sorted(times)


def test_every_byte_by_itself_gives_the_time_of_the_end_of_the_line():
    raw = b"data: ab\r\n\r\ndata: c\n\n"
    chunks = [(float(index), raw[index : index + 1]) for index in range(len(raw))]
    assert read_events(chunks) == [(8.0, b"ab"), (19.0, b"c")]


@pytest.mark.parametrize("end", ["", "\n", "\r", "\r\n", "\n\n"])
def test_an_event_that_the_end_cuts_off_counts(end):
    assert whole(f"data: a\n\ndata: [DONE]{end}".encode()) == [b"a", b"[DONE]"]


def test_nothing_is_nothing():
    assert read_events([]) == []
    assert whole(b"") == []
    assert whole(b"\n\n\r\n: only a comment") == []


def test_a_byte_order_mark_is_not_part_of_the_first_line():
    assert whole(b"\xef\xbb\xbfdata: a\n\n") == [b"a"]
