"""The wire: every message survives the trip, and nothing else is taken for one."""

import hashlib
import struct
from dataclasses import is_dataclass
from enum import StrEnum
from typing import get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.codec import PROTOCOL_VERSION, decode, encode
from shared.errors import WireError
from shared.ids import Biases, Ids, RequestId, SequenceId
from shared.sampling import DrawParams, SamplingParams
from tests.fuzzing import many_cases

LINKS = {
    "to_scheduler": messages.TO_SCHEDULER,
    "to_gateway": messages.TO_GATEWAY,
    "from_executor": messages.FROM_EXECUTOR,
    "to_executor": messages.TO_EXECUTOR,
}
ALL = {message_class for accepted in LINKS.values() for message_class in accepted}

INT32 = st.integers(-(2**31), 2**31 - 1)
PLAIN = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    bool: st.booleans(),
    type(None): st.none(),
}


def values_of(hint):
    """A strategy for one annotation of a message field."""
    if hint == Ids:
        return st.lists(INT32, max_size=5).map(tuple)
    if hint == Biases:
        return st.lists(st.tuples(INT32, PLAIN[float]), max_size=5).map(tuple)
    hint = getattr(hint, "__supertype__", hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: values_of(part) for name, part in hints.items()})
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            return st.lists(values_of(parts[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, parts))
    if get_args(hint):
        return st.one_of(*map(values_of, get_args(hint)))
    return PLAIN[hint] if hint in PLAIN else st.sampled_from(hint)


@pytest.mark.parametrize("message_class", sorted(ALL, key=lambda c: c.__name__))
def test_every_message_survives_the_trip(message_class):
    @given(values_of(message_class))
    def survives(message):
        assert decode(encode(message), [message_class]) == message

    survives()


def test_ids_are_little_endian_int32():
    frame = encode(messages.StreamPosition("r", (1, -1)))
    assert msgpack.unpackb(frame)[2] == ["r", b"\x01\0\0\0\xff\xff\xff\xff"]


HELLO = messages.Hello(7)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "malformed"),
        (encode(HELLO)[:-1], "malformed"),
        (encode(HELLO) + b"\0", "malformed"),
        (msgpack.packb({"a": 1}), "malformed"),
        (b"\x93\x01\xa5Hello\x81\x91\x01\x02", "malformed"),  # a map whose key is a list
        (b"\x93\x01\xa5Hello\x91\xd4\x05\x00", "malformed"),  # an extension type
        (msgpack.packb([1, "Hello"]), "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (b"\x93" + b"\x91" * 1000 + b"\x90\xa5Hello\x90", "version"),
        (b"\x93" + bytes([PROTOCOL_VERSION]) + b"\x91" * 1000 + b"\x90\x90", "unknown"),
        (b"\x93" + bytes([PROTOCOL_VERSION]) + b"\xa5Hello" + b"\x91" * 1000 + b"\x90", "invalid"),
        (msgpack.packb([PROTOCOL_VERSION + 1, "Hello", [7]]), "version"),
        (msgpack.packb([True, "Hello", [7]]), "version"),
        (msgpack.packb([PROTOCOL_VERSION, "Goodbye", [7]]), "unknown"),
        (msgpack.packb([PROTOCOL_VERSION, ["Hello"], [7]]), "unknown"),
        (msgpack.packb([PROTOCOL_VERSION, "Hello", [7, 8]]), "invalid"),
        (msgpack.packb([PROTOCOL_VERSION, "Hello", 7]), "invalid"),
        (msgpack.packb([PROTOCOL_VERSION, "Hello", ["7"]]), "invalid"),
        (msgpack.packb([PROTOCOL_VERSION, "Hello", [True]]), "invalid"),
        (bytes(64 * 2**20 + 1), "oversized"),
    ],
)
def test_anything_else_is_a_wire_error(frame, reason):
    with pytest.raises(WireError) as caught:
        decode(frame, messages.TO_SCHEDULER)
    assert caught.value.reason == reason


def test_a_torn_id_list_is_refused():
    frame = msgpack.packb([PROTOCOL_VERSION, "StreamPosition", ["r", b"\0\0\0"]])
    with pytest.raises(WireError, match="positions"):
        decode(frame, [messages.StreamPosition])


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(WireError, match="not expected"):
        decode(encode(messages.Drain()), messages.TO_SCHEDULER)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=8)
    | st.dictionaries(st.text(max_size=2) | st.tuples(st.integers(0, 9)), inner, max_size=2),
    max_leaves=20,
)  # fmt: skip
DEEPER = st.sampled_from([True, True, True, False])
on_every_link = pytest.mark.parametrize("accepted", LINKS.values(), ids=LINKS)


@pytest.mark.fuzz
@on_every_link
def test_any_well_formed_body_is_the_message_or_a_wire_error(accepted):
    tags = st.sampled_from([message_class.__name__ for message_class in accepted])

    @many_cases
    @given(tags, ANYTHING)
    def is_the_message_or_an_error(tag, body):
        frame = msgpack.packb([PROTOCOL_VERSION, tag, body])
        try:
            message = decode(frame, accepted)
        except WireError:
            return
        assert type(message).__name__ == tag

    is_the_message_or_an_error()


@pytest.mark.fuzz
@on_every_link
def test_a_message_with_a_part_of_noise_is_a_message_or_a_wire_error(accepted):
    """Nearly right: a real message, one of whose parts, at any depth, is something else."""
    real = st.one_of([values_of(message_class) for message_class in accepted])

    @many_cases
    @given(real, ANYTHING, st.data())
    def is_a_message_or_an_error(message, noise, data):
        envelope = msgpack.unpackb(encode(message))
        place, at = envelope, 2
        while type(place[at]) is list and place[at] and (place is envelope or data.draw(DEEPER)):
            place, at = place[at], data.draw(st.integers(0, len(place[at]) - 1))
        place[at] = noise
        try:
            decoded = decode(msgpack.packb(envelope), accepted)
        except WireError:
            return
        assert type(decoded) is type(message)

    is_a_message_or_an_error()


def wire_form(message_class):
    """Names and types of all fields, nested ones too."""
    hints = get_type_hints(message_class, include_extras=True)
    return [(name, str(hint), nested(hint)) for name, hint in hints.items()]


def nested(hint):
    if is_dataclass(hint):
        return wire_form(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return list(hint)
    return [nested(part) for part in get_args(hint)]


def test_a_changed_wire_form_is_a_new_protocol_version():
    """If this fails: raise PROTOCOL_VERSION, and write the new digest beside it."""
    forms = sorted((message.__name__, wire_form(message)) for message in ALL)
    digest = hashlib.sha256(repr(forms).encode()).hexdigest()[:16]
    assert (PROTOCOL_VERSION, digest) == (5, "8d928f39485738ef")


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        ([b"\1\0\0\0", b""], "1 ids and 0 numbers"), ([b"\1\0\0\0"], "not 1 items"),
        ([b"", b"\0" * 7], "logit_bias"), ("ab", "takes list"), ([[], []], "takes bytes"),
    ],
)  # fmt: skip
def test_biases_are_as_many_numbers_as_ids(wire, why):
    params = SamplingParams(draw=DrawParams(logit_bias=((1, 0.5),)))
    frame = msgpack.unpackb(encode(messages.Submit(RequestId("r"), (1,), params)))
    draw = frame[2][2][0]
    draw[draw.index([b"\1\0\0\0", struct.pack("<d", 0.5)])] = wire
    with pytest.raises(WireError, match=why):
        decode(msgpack.packb(frame), [messages.Submit])


@pytest.mark.fuzz
@on_every_link
def test_noise_is_never_more_than_a_wire_error(accepted):
    @many_cases
    @given(st.binary(max_size=200))
    def is_an_error(noise):
        with pytest.raises(WireError):
            decode(noise, accepted)

    is_an_error()


def test_an_id_beyond_int32_is_not_sent():
    row = messages.Row(SequenceId(1), (2**31,), 0, ())
    with pytest.raises(WireError, match="unencodable"):
        encode(messages.StepPlan(1, 1, (row,)))
