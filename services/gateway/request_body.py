"""A request's body: strict JSON, one object."""

import json
from typing import Any, Final, NoReturn

from shared.errors import RequestError

_MAX_DEPTH: Final = 32


class MalformedBody(RequestError):
    """The body is no JSON object in UTF-8."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Refused, because readers differ on them: duplicate keys, NaN and Infinity, lone surrogates, a
    byte order mark, nesting deeper than any field needs.
    Raises: MalformedBody.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(
            f"the body is not UTF-8 (byte {error.start}): send JSON encoded as UTF-8"
        ) from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise MalformedBody(f"the body is nested deeper than {_MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise MalformedBody(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:  # ours below, or an integer of thousands of digits
        raise MalformedBody(f"the body is no JSON this server takes: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object")
    _check(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedBody(f"{twice[:100]!r} is given twice", twice[:100])
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(body: dict[str, Any]) -> None:
    """Refuse text that has no UTF-8 form and nesting that no field needs, without recursion."""
    waiting: list[tuple[Any, str, int]] = [(body, "", 0)]
    while waiting:
        value, path, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise MalformedBody(f"{path[:100]} is nested deeper than {_MAX_DEPTH} levels", None)
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, dict):
            for name, item in value.items():
                _check_text(name, path)
                waiting.append((item, f"{path}.{name}" if path else name, depth + 1))
        elif isinstance(value, list):
            waiting += [(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedBody(
            f"{path or 'a field name'}: character {error.start} is half of a surrogate pair, which "
            "is no text: send both halves or none",
            path or None,
        ) from None
