"""A request's body: strict JSON, one object."""

import json
import re
import sys
from typing import Any, Final, NoReturn

from services.gateway.field_errors import written
from shared.errors import RequestError

MAX_VALUES: Final = 2**18
"""Objects, lists, strings, numbers: ~100 bytes and ~1 us each. Two prompts of 128 Ki token ids."""

_MAX_DEPTH: Final = 32
_TOO_MANY: Final = re.compile(
    rb'(?:(?:[^",\[{]++|"(?:[^"\\]++|\\.)*+"?)*+[,\[{]){%d}+' % MAX_VALUES, re.DOTALL
)
"""So many commas and brackets outside strings: each value but the first follows one of them."""
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")

_Path = tuple[Any, str | int] | None
"""Where a value is: its container's path, and its name or index there. Written out for errors."""


class MalformedBody(RequestError):
    """The body is no JSON object in UTF-8."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Refused, because readers differ on them: duplicate keys, NaN and Infinity, lone surrogates, a
    byte order mark. Refused, because no field needs them: deep nesting, MAX_VALUES values. Time and
    memory are linear in the body, whatever is in it.
    Raises: MalformedBody.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(
            f"the body is not UTF-8 (byte {error.start}): send JSON encoded as UTF-8"
        ) from None
    if _TOO_MANY.match(body):
        raise MalformedBody(f"the body has too many values; about {MAX_VALUES} are read")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(None) from None
    except json.JSONDecodeError as error:
        raise MalformedBody(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError:
        raise MalformedBody(
            f"an integer in the body has more than {sys.get_int_max_str_digits()} digits; no field "
            "takes that"
        ) from None
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object")
    _check(value, has_half_pairs=_HALF_PAIR.search(body) is not None)
    return value


class _Repeating(dict[str, Any]):
    """An object that gives a name twice; `repeated` is the first such name."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                self.repeated = name
                break
            names.add(name)


_HOLDERS: Final = frozenset((dict, _Repeating, list))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _Repeating(pairs)


def _no_constant(name: str) -> NoReturn:
    raise MalformedBody(f"the body is no JSON: {name} is not a number of JSON")


def _check(body: dict[str, Any], *, has_half_pairs: bool) -> None:
    """Refuse names given twice, nesting that no field needs, and text that has no UTF-8 form."""
    waiting: list[tuple[Any, _Path, int]] = [(body, None, 0)]
    while waiting:
        value, path, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise _too_deep(path)
        if isinstance(value, dict):
            if isinstance(value, _Repeating):
                twice = written(*_parts((path, value.repeated)))
                raise MalformedBody(f"{twice!r} is given twice", twice)
            if has_half_pairs:
                for name in value:
                    _check_text(name, path, "a field name")
            waiting += [(item, (path, name), depth + 1) for name, item in value.items()]
        elif isinstance(value, list):
            if not has_half_pairs and _HOLDERS.isdisjoint(map(type, value)):
                continue  # nothing to look into: token ids, by the hundred thousand
            waiting += [(item, (path, index), depth + 1) for index, item in enumerate(value)]
        elif has_half_pairs and isinstance(value, str):
            _check_text(value, path, "")


def _parts(path: _Path) -> list[str | int]:
    parts: list[str | int] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return parts[::-1]


def _too_deep(path: _Path) -> MalformedBody:
    where = written(*_parts(path)[:4]) or "the body"
    return MalformedBody(f"{where} is nested deeper than {_MAX_DEPTH} levels")


def _check_text(text: str, path: _Path, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = written(*_parts(path))
        raise MalformedBody(
            f"{what or where}: character {error.start} is half of a surrogate pair, which "
            "is no text: send both halves or none",
            where or None,
        ) from None
