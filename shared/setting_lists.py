"""Settings that are lists: commas between, a JSON list, or a flag given several times."""

import json
import re
from typing import Any, Final

_KEY: Final = re.compile("[!-~]+")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/,]+")


def _listed(given: Any) -> Any:
    """A flag's or variable's list: commas between, or a JSON list. No error tells its items."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.lstrip().startswith("[") else given.split(",")
    except ValueError:
        raise ValueError("begins as a JSON list and is none") from None


def origins(given: Any) -> tuple[str, ...]:
    """Origins as browsers write them, or `*`. Raises: ValueError."""
    given = _listed(given)
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ValueError("takes one origin, or a list of origins")
    for origin in given:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r}: write https://example.org, without a path, or *")
    return tuple(dict.fromkeys(given))


def api_keys(given: Any) -> tuple[str, ...]:
    """From a flag or the environment: commas between, or a JSON list. No error tells a key."""
    given = _listed(given)
    if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
        raise ValueError("takes one key, or a list of keys")
    for number, key in enumerate(given, start=1):
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"key {number} of {len(given)} is {'empty' if not key else 'no token'}: a key is "
                "printable ASCII without spaces"
            )
    return tuple(dict.fromkeys(given))
