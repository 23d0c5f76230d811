"""Messages to bytes and back: the only place that knows msgpack.

The envelope is `[version, tag, [fields]]`: the tag is the class name, the fields stand in the
order of the dataclass, nested dataclasses are lists of their fields, `Ids` are little-endian int32
byte strings, `Biases` two such strings. Decoding is strict: a wrong version, tag, type or count, or
a message over the size limit, is a WireError and nothing of it is used.
"""

import struct
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, NewType, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from shared.errors import InvariantBroken, WireError
from shared.ids import Biases, Ids

PROTOCOL_VERSION: Final = 5
MAX_MESSAGE_BYTES: Final = 64 * 2**20

_Coder = Callable[[Any], Any]
_Message = TypeVar("_Message")
_NEVER: Final = object()


@dataclass(frozen=True, slots=True)
class _Form:
    """How values of one type are written and read.

    Values of type `same` are on the wire what they are here, and any other is for `from_wire`. The
    value `nothing`, () or None, is `nothing_there` on the wire: most values are, and need no call.
    """

    to_wire: _Coder
    from_wire: _Coder
    same: type | None = None
    nothing: object = _NEVER
    nothing_there: object = _NEVER


def encode(message: object) -> bytes:
    """One message as bytes.

    Raises: WireError if a number does not fit (an id beyond int32, an int beyond 64 bits) or the
    message is over MAX_MESSAGE_BYTES.
    """
    form = _form_of(type(message))
    try:
        frame = msgpack.packb([PROTOCOL_VERSION, type(message).__name__, form.to_wire(message)])
    except (OverflowError, ValueError, TypeError, struct.error) as error:
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
    try:
        message: _Message = _form_of(message_class).from_wire(body)
    except (TypeError, ValueError) as error:
        raise WireError("invalid", f"{tag}: {error}") from error
    return message


_known: dict[type, _Form] = {}


def _form_of(message_class: type) -> _Form:
    """That of a dataclass, built once from its annotations."""
    if message_class not in _known:
        _known[message_class] = _build_form(message_class)
    return _known[message_class]


def _build_form(message_class: type) -> _Form:
    """A step's messages have some thousand fields: what can be done for all of them at once, is."""
    if not is_dataclass(message_class):
        raise InvariantBroken(f"{message_class!r} is no message")
    constructor: Callable[..., Any] = message_class
    hints = get_type_hints(message_class, include_extras=True)
    forms = {field.name: _form(hints[field.name]) for field in fields(message_class)}
    names = list(forms)
    same = [(i, form.same, form.from_wire) for i, form in enumerate(forms.values()) if form.same]
    floats = [i for i, form in enumerate(forms.values()) if form.same is float]
    others = [
        (i, form.nothing, form.nothing_there, form.to_wire, form.from_wire)
        for i, form in enumerate(forms.values())
        if form.same is None
    ]

    def to_wire(message: Any) -> list[Any]:
        values = [getattr(message, name) for name in names]
        for i in floats:
            values[i] = float(values[i])
        for i, nothing, nothing_there, write, _ in others:
            value = values[i]
            values[i] = nothing_there if value is nothing else write(value)
        return values

    def from_wire(body: Any) -> Any:
        if type(body) is not list or len(body) != len(forms):
            count = len(body) if type(body) is list else type(body).__name__
            raise ValueError(f"{message_class.__name__} has {len(forms)} fields, not {count}")
        values = body.copy()
        try:
            for i, kind, read in same:
                if type(values[i]) is not kind:
                    values[i] = read(values[i])
            for i, nothing, nothing_there, _, read in others:
                value = values[i]
                values[i] = nothing if value == nothing_there else read(value)
            return constructor(*values)
        except (TypeError, ValueError, struct.error) as error:
            raise ValueError(_blamed(forms, body) or str(error)) from None

    return _Form(to_wire, from_wire)


def _blamed(forms: dict[str, _Form], body: list[Any]) -> str:
    """Which field cannot be read, and why."""
    for (name, form), value in zip(forms.items(), body, strict=True):
        try:
            form.from_wire(value)
        except (TypeError, ValueError, struct.error) as error:
            return f"{name}: {error}"
    return ""


def _form(hint: Any) -> _Form:
    """That of one annotation."""
    if hint == Ids:
        return _Form(_ids_to_wire, _ids_from_wire, nothing=(), nothing_there=b"")
    if hint == Biases:
        return _Form(_biases_to_wire, _biases_from_wire, nothing=(), nothing_there=[b"", b""])
    if isinstance(hint, NewType):
        return _form(hint.__supertype__)
    origin = get_origin(hint)
    if origin is types.UnionType:
        return _optional(hint)
    if origin is tuple:
        return _tuple(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _form_of(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Form(str, lambda value: hint(_exactly(str, value)))
    if hint is float:
        return _Form(float, _float_from_wire, same=float)
    if hint in (int, str, bool, bytes):
        return _Form(_same, lambda value: _exactly(hint, value), same=hint)
    raise InvariantBroken(f"no wire form for {hint!r}")


def _optional(hint: Any) -> _Form:
    inner = [part for part in get_args(hint) if part is not types.NoneType]
    if len(inner) != 1:
        raise InvariantBroken(f"no wire form for the union {hint!r}")
    to_wire, from_wire = (form := _form(inner[0])).to_wire, form.from_wire
    return _Form(
        lambda value: None if value is None else to_wire(value),
        lambda value: None if value is None else from_wire(value),
        nothing=None,
        nothing_there=None,
    )


def _tuple(hint: Any) -> _Form:
    arguments = get_args(hint)
    if arguments == (float, Ellipsis):
        return _Form(_floats_to_wire, _floats_from_wire, nothing=(), nothing_there=[])
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        to_wire, from_wire = (form := _form(arguments[0])).to_wire, form.from_wire
        return _Form(
            lambda value: [to_wire(item) for item in value],
            lambda value: tuple([from_wire(item) for item in _exactly(list, value)]),
            nothing=(),
            nothing_there=[],
        )
    forms = [_form(argument) for argument in arguments]

    def fixed_from_wire(value: Any) -> tuple[Any, ...]:
        if len(_exactly(list, value)) != len(forms):
            raise ValueError(f"takes {len(forms)} items, not {len(value)}")
        return tuple([form.from_wire(item) for form, item in zip(forms, value, strict=True)])

    return _Form(
        lambda value: [form.to_wire(item) for form, item in zip(forms, value, strict=True)],
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


_FEW: Final = tuple([struct.Struct(f"<{count}i") for count in range(257)])


def _int32s(count: int) -> struct.Struct:
    return _FEW[count] if count < len(_FEW) else struct.Struct(f"<{count}i")


def _ids_to_wire(ids: tuple[int, ...]) -> bytes:
    return _int32s(len(ids)).pack(*ids)


def _ids_from_wire(value: Any) -> tuple[int, ...]:
    return _int32s(len(_exactly(bytes, value)) // 4).unpack(value)


def _biases_to_wire(biases: tuple[tuple[int, float], ...]) -> list[bytes]:
    ids, numbers = zip(*biases, strict=True) if biases else ((), ())
    return [_ids_to_wire(ids), struct.pack(f"<{len(numbers)}d", *numbers)]


def _biases_from_wire(value: Any) -> tuple[tuple[int, float], ...]:
    if len(_exactly(list, value)) != 2:
        raise ValueError(f"takes ids and numbers, not {len(value)} items")
    ids = _ids_from_wire(value[0])
    numbers = struct.unpack(f"<{len(_exactly(bytes, value[1])) // 8}d", value[1])
    if len(ids) != len(numbers):
        raise ValueError(f"{len(ids)} ids and {len(numbers)} numbers")
    return tuple(zip(ids, numbers, strict=True))
