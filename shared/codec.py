"""Messages to bytes and back: the only place that knows msgpack.

The envelope is `[version, tag, [fields]]`: the tag is the class name, the fields stand in the
order of the dataclass, nested dataclasses are lists of their fields, `Ids` are little-endian int32
byte strings, `Biases` two such strings. Decoding is strict: a wrong version, tag, type or count, or
a message over the size limit, is a WireError and nothing of it is used.
"""

import sys
import types
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, NewType, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from shared.errors import InvariantBroken, WireError
from shared.ids import Biases, Ids

PROTOCOL_VERSION: Final = 5
MAX_MESSAGE_BYTES: Final = 64 * 2**20

_Coder = Callable[[Any], Any]
_Message = TypeVar("_Message")


def encode(message: object) -> bytes:
    """One message as bytes.

    Raises: WireError if a number does not fit (an id beyond int32, an int beyond 64 bits) or the
    message is over MAX_MESSAGE_BYTES.
    """
    to_wire, _ = _coders(type(message))
    try:
        frame = msgpack.packb([PROTOCOL_VERSION, type(message).__name__, to_wire(message)])
    except (OverflowError, ValueError, TypeError) as error:
        raise WireError("unencodable", f"{type(message).__name__}: {error}") from error
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError("oversized", f"{type(message).__name__} has {len(frame)} bytes")
    return bytes(frame)


def decode(frame: bytes, accepted: Sequence[type[_Message]]) -> _Message:
    """The message in `frame`, if it is one of the `accepted` classes.

    Raises: WireError with the reason oversized, malformed, version, unknown or invalid.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError("oversized", f"{len(frame)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        envelope = msgpack.unpackb(frame, max_map_len=0, max_ext_len=0)  # no message has either
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError("malformed", f"no msgpack: {type(error).__name__} {error}") from error
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise WireError("malformed", "not an envelope of version, tag and fields")
    version, tag, body = envelope
    if type(version) is not int or version != PROTOCOL_VERSION:
        said = version if type(version) is int else type(version).__name__
        raise WireError("version", f"protocol version {said}, not {PROTOCOL_VERSION}")
    if type(tag) is not str:
        raise WireError("unknown", f"a tag of type {type(tag).__name__}")
    for message_class in accepted:
        if message_class.__name__ == tag:
            break
    else:
        raise WireError("unknown", f"tag {tag[:40]!r} is not expected on this link")
    _, from_wire = _coders(message_class)
    try:
        message: _Message = from_wire(body)
    except (TypeError, ValueError) as error:
        raise WireError("invalid", f"{tag}: {error}") from error
    return message


_known: dict[type, tuple[_Coder, _Coder]] = {}


def _coders(message_class: type) -> tuple[_Coder, _Coder]:
    """(to_wire, from_wire) of a dataclass, built once from its annotations."""
    if message_class not in _known:
        _known[message_class] = _build_coders(message_class)
    return _known[message_class]


def _build_coders(message_class: type) -> tuple[_Coder, _Coder]:
    if not is_dataclass(message_class):
        raise InvariantBroken(f"{message_class!r} is no message")
    constructor: Callable[..., Any] = message_class
    hints = get_type_hints(message_class, include_extras=True)
    names = [field.name for field in fields(message_class)]
    coders = [_coder(hints[name]) for name in names]
    encoders = [(name, to_wire) for name, (to_wire, _) in zip(names, coders, strict=True)]
    decoders = [(name, from_wire) for name, (_, from_wire) in zip(names, coders, strict=True)]

    def to_wire(message: Any) -> list[Any]:
        return [encoder(getattr(message, name)) for name, encoder in encoders]

    def from_wire(body: Any) -> Any:
        if type(body) is not list or len(body) != len(decoders):
            count = len(body) if type(body) is list else type(body).__name__
            raise ValueError(f"{message_class.__name__} has {len(decoders)} fields, not {count}")
        values = []
        for (name, decoder), value in zip(decoders, body, strict=True):
            try:
                values.append(decoder(value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from None
        return constructor(*values)

    return to_wire, from_wire


def _coder(hint: Any) -> tuple[_Coder, _Coder]:
    """(to_wire, from_wire) of one annotation."""
    if hint == Ids:
        return _ids_to_wire, _ids_from_wire
    if hint == Biases:
        return _biases_to_wire, _biases_from_wire
    if isinstance(hint, NewType):
        return _coder(hint.__supertype__)
    origin = get_origin(hint)
    if origin is types.UnionType:
        return _optional(hint)
    if origin is tuple:
        return _tuple(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _coders(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str, lambda value: hint(_exactly(str, value))
    if hint is float:
        return float, _float_from_wire
    if hint in (int, str, bool, bytes):
        return _same, lambda value: _exactly(hint, value)
    raise InvariantBroken(f"no wire form for {hint!r}")


def _optional(hint: Any) -> tuple[_Coder, _Coder]:
    inner = [part for part in get_args(hint) if part is not types.NoneType]
    if len(inner) != 1:
        raise InvariantBroken(f"no wire form for the union {hint!r}")
    to_wire, from_wire = _coder(inner[0])
    return (
        lambda value: None if value is None else to_wire(value),
        lambda value: None if value is None else from_wire(value),
    )


def _tuple(hint: Any) -> tuple[_Coder, _Coder]:
    arguments = get_args(hint)
    if arguments == (float, Ellipsis):
        return _floats_to_wire, _floats_from_wire
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        to_wire, from_wire = _coder(arguments[0])
        return (
            lambda value: [to_wire(item) for item in value],
            lambda value: tuple([from_wire(item) for item in _exactly(list, value)]),
        )
    coders = [_coder(argument) for argument in arguments]

    def fixed_from_wire(value: Any) -> tuple[Any, ...]:
        if len(_exactly(list, value)) != len(coders):
            raise ValueError(f"takes {len(coders)} items, not {len(value)}")
        return tuple([from_wire(item) for (_, from_wire), item in zip(coders, value, strict=True)])

    return (
        lambda value: [to_wire(item) for (to_wire, _), item in zip(coders, value, strict=True)],
        fixed_from_wire,
    )


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"takes {kind.__name__}, not {type(value).__name__}")
    return value


def _float_from_wire(value: Any) -> float:
    if type(value) is int:
        return float(value)
    return float(_exactly(float, value))


def _floats_to_wire(numbers: tuple[float, ...]) -> list[float]:
    return list(map(float, numbers))


def _floats_from_wire(value: Any) -> tuple[float, ...]:
    """Of log-probabilities there may be 100,000s in a message: no call for each."""
    if set(map(type, _exactly(list, value))) <= {float}:
        return tuple(value)
    return tuple(map(_float_from_wire, value))


def _ids_to_wire(ids: tuple[int, ...]) -> bytes:
    return _little_endian(array("i", ids)).tobytes()


def _ids_from_wire(value: Any) -> tuple[int, ...]:
    return tuple(_numbers("i", value))


def _biases_to_wire(biases: tuple[tuple[int, float], ...]) -> list[bytes]:
    ids, numbers = zip(*biases, strict=True) if biases else ((), ())
    return [_ids_to_wire(ids), _little_endian(array("d", numbers)).tobytes()]


def _biases_from_wire(value: Any) -> tuple[tuple[int, float], ...]:
    if len(_exactly(list, value)) != 2:
        raise ValueError(f"takes ids and numbers, not {len(value)} items")
    ids, numbers = _numbers("i", value[0]), _numbers("d", value[1])
    if len(ids) != len(numbers):
        raise ValueError(f"{len(ids)} ids and {len(numbers)} numbers")
    return tuple(zip(ids, numbers, strict=True))


def _numbers(kind: str, value: Any) -> "array[Any]":
    numbers: array[Any] = array(kind)
    numbers.frombytes(_exactly(bytes, value))
    return _little_endian(numbers)


def _little_endian(numbers: "array[Any]") -> "array[Any]":
    """From the wire's order to this machine's, or back."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
