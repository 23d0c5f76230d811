"""The file of API keys: for each a name, a hash, and how much its holder may ask.

    [alice]
    sha256 = "9f86d0..."            # of the key, in hex
    max_concurrent_requests = 8     # these three are optional
    requests_per_minute = 120
    tokens_per_minute = 100000

`splitflap keys api` makes such a table. A key has 256 random bits, which nobody finds by trying,
in a table or one after the other; so a salt or a slow hash would protect nothing that SHA-256 does
not, and every request would pay for it. A key that a person made up is not for this file.
"""

import hashlib
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from shared.errors import StartError
from shared.logs import get_logger

FLAG: Final = "--api-key-file"

_KEY_PREFIX: Final = "sk-"
_KEY_BYTES: Final = 32
_NAME: Final = re.compile("[A-Za-z0-9_-]{1,64}")  # a bare key of TOML
_DIGEST: Final = re.compile("[0-9a-f]{64}")

_log = get_logger("keys")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may ask of one gateway; None: as much as it likes."""

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One table of the file."""

    name: str
    digest: bytes
    limits: Limits


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key(name: str, limits: Limits) -> tuple[str, str]:
    """(a new key, its table for the file).

    Raises: ValueError if the name cannot be one, or a limit is below 1.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 letters, digits, - and _")
    key = _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    lines = [f"[{name}]", f'sha256 = "{digest_of(key).hex()}"']
    for limit, most in asdict(limits).items():
        if most is not None:
            if most < 1:
                raise ValueError(f"{limit} must be at least 1")
            lines.append(f"{limit} = {most}")
    return key, "\n".join(lines) + "\n"


def read_keys(path: Path) -> tuple[NamedKey, ...]:
    """Every key of a file, in its order.

    Raises: StartError naming the table and field that is wrong; it tells no hash.
    """
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            tables = tomllib.load(file)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else f"as TOML: {error}"
        raise StartError(f"{FLAG} {path}: cannot be read ({said})") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartError(
            f"{FLAG} {path}: others may write to it (mode {stat.S_IMODE(mode):o}), and so let "
            "themselves in; chmod 600 it"
        )
    if mode & stat.S_IROTH:
        _log.warning("api_key_file_is_readable_by_all", path=str(path), advice="chmod 600 it")
    keys = tuple([_key(f"{FLAG} {path}, {name}", name, table) for name, table in tables.items()])
    owners: dict[bytes, str] = {}
    for key in keys:
        if owners.setdefault(key.digest, key.name) != key.name:
            raise StartError(
                f"{FLAG} {path}: {owners[key.digest]} and {key.name} have the same key; make one "
                "of them another"
            )
    return keys


def _key(where: str, name: str, table: Any) -> NamedKey:
    if not isinstance(table, Mapping):
        raise StartError(f"{where}: is no table; write [NAME], and sha256 = below it")
    limits = {field.name for field in fields(Limits)}
    for field in table:
        if field not in limits | {"sha256"}:
            known = ", ".join(["sha256", *sorted(limits)])
            raise StartError(f"{where}: no field is called {field}; there are {known}")
    digest = table.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise StartError(
            f"{where}: sha256 must be the key's SHA-256, 64 hex digits in lower case; "
            f"`splitflap keys api --name {name}` makes a key and its table"
        )
    for field in limits & table.keys():
        if type(table[field]) is not int or table[field] < 1:
            raise StartError(f"{where}: {field} must be a whole number, at least 1")
    given = {field: most for field, most in table.items() if field != "sha256"}
    return NamedKey(name, bytes.fromhex(digest), Limits(**given))
