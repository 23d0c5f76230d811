"""Bodies and answers of /v1/prefixes."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.gateway.bodies import ConversationBody
from services.gateway.field_types import MAX_CACHE_SALT_CHARACTERS, MODEL, TOKEN_ID, Flag, Strict

MAX_NAME_CHARACTERS: Final = 128
_NAME: Final[Any] = Field(
    None, max_length=MAX_NAME_CHARACTERS, description="yours, told again by the list"
)
_SALT: Final[Any] = Field(
    None,
    min_length=1,
    max_length=MAX_CACHE_SALT_CHARACTERS,
    description="shared only with requests of the same salt (and the same API key)",
)

OnePrompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": TOKEN_ID, "minItems": 1},
            ]
        }
    ),
]


class PrefixTextBody(Strict):
    """POST /v1/prefixes: a text, or token ids."""

    model: str | None = MODEL
    prompt: OnePrompt
    name: str | None = _NAME
    cache_salt: str | None = _SALT
    add_special_tokens: Flag = Field(None, description="BOS and the like; default true")


class PrefixChatBody(ConversationBody):
    """POST /v1/prefixes: the beginning of a conversation."""

    model: str | None = MODEL
    name: str | None = _NAME
    cache_salt: str | None = _SALT
    add_generation_prompt: Flag = Field(
        None, description="default false: the prefix ends where the messages end"
    )
    add_special_tokens: Flag = Field(None, description="BOS and the like; default false")


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PrefixCard(_Form):
    """A pinned prefix."""

    id: str
    object: Literal["prefix"]
    created: int
    name: str | None
    num_tokens: int
    num_blocks: int = Field(description="of the KV pool, the last one perhaps in part")
    status: Literal["ready", "computing"]
    hits: int = Field(description="requests that have begun with it since the scheduler started")


class PrefixList(_Form):
    """Those of this API key, oldest first."""

    object: Literal["list"]
    data: list[PrefixCard]


class PrefixDeleted(_Form):
    """It is pinned no more."""

    id: str
    object: Literal["prefix"]
    deleted: Literal[True]
