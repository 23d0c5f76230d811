"""Settings as flags: the text of --help, and what may have been meant by a flag that is none."""

import shutil
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

HIDDEN: Final[Any] = {"hidden": True}
"""`json_schema_extra` of a field that --help does not tell."""

_METAVARS: Final = {int: "N", float: "X", bool: "", Path: "PATH"}
_INDENT: Final = 34
_MOST_COLUMNS: Final = 120
_NOT_OURS: Final = {
    "--help-all": "--help lists them",
    "--trust-remote-code": "no code of a model is ever run here",
}
"""Flags of other servers, and what stands for them here."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether one of the flags is --help."""
    return "--help" in arguments or "-h" in arguments


def help_text(settings_class: type[BaseSettings], program: str) -> str:
    """Every flag with its text and default."""
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    about = (settings_class.__doc__ or "").strip().partition("\n")[0]
    lines = [f"usage: {program} [flags]", "", *textwrap.wrap(about, columns), ""]
    for name, field in settings_class.model_fields.items():
        if field.json_schema_extra != HIDDEN:
            lines += _entry(name, field, columns)
    lines += _wrapped("  -h, --help", "print this", columns)
    return "\n".join(lines) + "\n"


def meant(settings_class: type[BaseSettings], arguments: Sequence[str]) -> str:
    """Of the first flag that is none: what to give instead. Empty if all are known."""
    flags = {_flag(name): field for name, field in settings_class.model_fields.items()}
    known = [flag for flag, field in flags.items() if field.json_schema_extra != HIDDEN]
    negative = {"--no-" + flag[2:] for flag in flags}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in flags and name not in negative:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            return f"{name}: is no flag of this command; {_NOT_OURS.get(name, hint)}"
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _entry(name: str, field: FieldInfo, columns: int) -> list[str]:
    head = f"  {_flag(name)} {_metavar(field.annotation)}".rstrip()
    told = field.description or ""
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        told += " (required)"
    elif default is True:
        told += f" (default: on; off with --no-{_flag(name)[2:]})"
    elif default is not None and default is not False and default != ():
        told += f" (default: {default})"
    return _wrapped(head, told, columns)


def _wrapped(head: str, text: str, columns: int) -> list[str]:
    gap = " " * _INDENT
    lines = textwrap.wrap(text, max(columns - _INDENT, 20), break_on_hyphens=False) or [""]
    if len(head) + 1 < _INDENT:
        first, *rest = lines
        return [f"{head:<{_INDENT}}{first}", *[gap + line for line in rest]]
    return [head, *[gap + line for line in lines]]


def _metavar(annotation: Any) -> str:
    """What stands for a value of this type.

    >>> _metavar(int | None), _metavar(Literal["a", "b"]), _metavar(tuple[str, ...])
    ('N', '{a,b}', 'TEXT')
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(map(str, inside)) + "}"
    if origin in (Annotated, Union, UnionType, tuple):
        return _metavar(next(each for each in inside if each is not NoneType))
    return _METAVARS.get(annotation, "TEXT")
