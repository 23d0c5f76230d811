"""`splitflap keys`: makes API keys for clients, and CURVE keys for the links between processes."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from services.gateway.key_file import Limits, new_key, read_keys
from shared.curve import KEY_DIR_FLAG, make_keys
from shared.errors import StartError
from shared.settings import FLAG_RULES, Positive, from_flags

PROGRAM: Final = "splitflap keys"
USAGE: Final = f"""usage: {PROGRAM} KIND [flags]

  api         a key for a client of the gateways: told once; its hash goes to --api-key-file
  curve       keys for scheduler, gateway and executor, to talk beyond one machine

Each lists its flags with --help.
"""


class _Flags(BaseSettings):
    """Nothing is read from the servers' environment."""

    model_config = FLAG_RULES

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags alone."""
        return (init_settings,)


class ApiKeyFlags(_Flags):
    """`splitflap keys api`: the key to stderr, its entry for --api-key-file to stdout or --out."""

    name: str = Field(description="what logs call its holder: letters, digits, - and _")
    out: Path | None = Field(None, description="add the entry to this file; default: stdout")
    max_concurrent_requests: Positive | None = Field(
        None, description="requests at once; default: no limit"
    )
    requests_per_minute: Positive | None = Field(None, description="default: no limit")
    tokens_per_minute: Positive | None = Field(
        None, description="tokens of prompts and answers; default: no limit"
    )


class CurveKeyFlags(_Flags):
    """`splitflap keys curve`: a pair of keys for each kind of process."""

    out: Path = Field(description="an empty folder, or one to be made")


_Kind = TypeVar("_Kind", bound=_Flags)


def main(arguments: Sequence[str]) -> int:
    """Make keys; returns the exit status. Raises: StartError if that is not possible as asked."""
    kind, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    match kind:
        case "api":
            _make_api_key(_read(ApiKeyFlags, kind, rest))
        case "curve":
            _make_curve_keys(_read(CurveKeyFlags, kind, rest))
        case "--help" | "-h" | "help":
            sys.stdout.write(USAGE)
        case _:
            raise StartError(f"no kind of key is called {kind!r}; there are api and curve")
    return 0


def _read(flags: type[_Kind], kind: str, arguments: Sequence[str]) -> _Kind:
    return from_flags(flags, arguments, f"{PROGRAM} {kind}")


def _make_api_key(flags: ApiKeyFlags) -> None:
    limits = Limits(
        flags.max_concurrent_requests, flags.requests_per_minute, flags.tokens_per_minute
    )
    try:
        key, entry = new_key(flags.name, limits)
    except ValueError as error:
        raise StartError(f"--name {flags.name}: {error}") from error
    if flags.out is None:
        sys.stdout.write(entry)
        sys.stdout.flush()
    else:
        _append(flags.out, flags.name, entry)
    sys.stderr.write(f"the key of {flags.name}, shown this once:\n{key}\n")


def _append(path: Path, name: str, entry: str) -> None:
    """To the file's end; a new file is readable by this user alone."""
    if path.exists() and any(key.name == name for key in read_keys(path)):
        raise StartError(f"--out {path}: has a key of {name} already; take another --name")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(("\n" if os.fstat(descriptor).st_size else "") + entry)
    except OSError as error:
        raise StartError(f"--out {path}: cannot be written ({error.strerror})") from error


def _make_curve_keys(flags: CurveKeyFlags) -> None:
    for path in make_keys(flags.out):
        sys.stdout.write(f"{path}\n")
    sys.stderr.write(
        f"give each process a folder with its own as {KEY_DIR_FLAG}: the scheduler "
        "scheduler.secret, gateway.public and executor.public; gateways gateway.secret and "
        "scheduler.public; the executor executor.secret and scheduler.public\n"
    )
