"""A field's problem, in our words: which field, what is wrong, and not much of what was given."""

from typing import Any, Final

from pydantic import ValidationError

from shared.errors import InvalidField, RequestError

_MAX_NAME_SHOWN: Final = 64
_MAX_VALUE_SHOWN: Final = 40
_MANY: Final = 1e15  # numbers from here on are clearer with an exponent

_WORDS: Final = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be a boolean",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
"""pydantic's kinds of errors that the bodies above can have, in our words."""


def explained(error: ValidationError) -> RequestError:
    """The first problem, in our words."""
    problem = error.errors(include_url=False, include_context=True)[0]
    path, given, kind = written(*problem["loc"]), problem["input"], problem["type"]
    if kind == "missing":
        return InvalidField(path, "is required")
    if kind == "float_type" and type(given) is int:
        return InvalidField(path, "is too large for a number")
    if kind == "too_short":
        return InvalidField(path, "is empty; give at least 1 item")
    told = {name: _plain(value) for name, value in problem.get("ctx", {}).items()}
    said = _WORDS.get(kind, "is not what this field takes").format(**told)
    return InvalidField(path, f"{said}, not {_shown(given, kind)}")


def _plain(value: Any) -> Any:
    """A number as it would be written by hand.

    >>> _plain(86400.0), _plain(0.5), _plain(1e300)
    (86400, 0.5, 1e+300)
    """
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _MANY
    return int(value) if is_whole else value


def _shown(value: Any, kind: str) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a fraction", str: "a string",
             list: "a list", dict: "an object", type(None): "null"}  # fmt: skip
    if kind.endswith("_type") or isinstance(value, list | dict):
        return names[type(value)]
    if isinstance(value, str):
        cut = "..." if len(value) > _MAX_VALUE_SHOWN else ""
        return repr(value[:_MAX_VALUE_SHOWN]) + cut
    shown = repr(_plain(value))
    return shown if len(shown) <= _MAX_VALUE_SHOWN else shown[:_MAX_VALUE_SHOWN] + "..."


def written(*parts: str | int) -> str:
    """A field's path as clients write it; long names are cut.

    >>> written("messages", 3, "content")
    'messages[3].content'
    """
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            shown = part if len(part) <= _MAX_NAME_SHOWN else part[:_MAX_NAME_SHOWN] + "..."
            path += f".{shown}" if path else shown
    return path
