"""The types and limits of the fields that a client may send, and how /openapi.json tells them.

Limits that `shared.sampling` checks with the vocabulary at hand are only told here
(`json_schema_extra`); those in `ge`, `le` and `Literal` are checked here.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.gateway.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from shared.sampling import MAX_N

INT32_MAX: Final = 2**31 - 1
MAX_DEADLINE_S: Final = 86_400
MAX_MESSAGES: Final = 4096
MAX_METADATA: Final = 16  # OpenAI's
MAX_PROMPTS: Final = 1024
MAX_CHOICES: Final = 1024  # of one request: prompts times the answers generated to each
MAX_CACHE_SALT_CHARACTERS: Final = 128
MAX_BAD_TEXTS: Final = 64  # each is at most two runs of tokens
MAX_BANNED_TOKEN_IDS: Final = 128  # with those runs: shared.sampling.MAX_BAD_WORDS
MAX_BAD_TEXT_CHARACTERS: Final = 128
TOKEN_ID: Final[dict[str, Any]] = {
    "title": "token id",
    "type": "integer",
    "minimum": 0,
    "maximum": INT32_MAX,
}
"""/openapi.json lowers the maximum to the vocabulary's."""

TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_IDS: Final[dict[str, Any]] = {"type": "array", "items": TOKEN_ID, "minItems": 1}
_NULL: Final = {"type": "null"}
_STOP_STRING: Final = TEXT | {"maxLength": MAX_STOP_CHARACTERS}
_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}

Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                TEXT,
                {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "description": (
                "a text, token ids, or a list of either; each is answered by n choices, at most "
                f"{MAX_CHOICES} in all"
            ),
        }
    ),
]
"""Checked by hand (`prompts.py`): it may be long, and pydantic makes an error of each item."""

Content = Annotated[
    str,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}],
            "description": "a text, or parts of type text, which are joined by newlines",
        }
    ),
]
StopStrings = Annotated[
    list[str] | None,
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
                _NULL,
            ],
            "description": "texts that end the answer",
        }
    ),
]
TokenId = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WithJsonSchema(TOKEN_ID)]
TokenIds = Annotated[Any, WithJsonSchema({"type": "array", "items": TOKEN_ID})]
"""Checked by hand, as `Prompt` is."""

EarlyStopping = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "boolean"}, {"const": "never"}, _NULL],
            "description": (
                "only with use_beam_search. true: it ends with the n-th text that has ended; false "
                "(default): when no beam is likely to end better than those; never: when none can"
            ),
        }
    ),
]
"""Checked by hand: to pydantic's `Literal[True]`, 1 is true."""

Flag = bool | None
MODEL: Final[Any] = Field(None, description="one of /v1/models; default: the first")
RETURN_TOKEN_STRS: Final[Any] = Field(None, description="token_strs: how each token is written")


def between(low: float, high: float, description: str, *, open_low: bool = False) -> Any:
    """An optional number whose limits `check_sampling` checks."""
    lowest = "exclusiveMinimum" if open_low else "minimum"
    return Field(None, description=description, json_schema_extra={lowest: low, "maximum": high})


def count(description: str) -> Any:
    """An optional number of answers, whose limits are checked later."""
    limits: Any = {"minimum": 1, "maximum": MAX_N}
    return Field(
        None, ge=-INT32_MAX, le=INT32_MAX, description=description, json_schema_extra=limits
    )


def ids_field(most: int, description: str) -> Any:
    """An optional list of token ids, whose length is checked before it is read."""
    return Field(None, description=description, json_schema_extra={"maxItems": most})


class Strict(BaseModel):
    """No type stands for another, and every name is known."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )
