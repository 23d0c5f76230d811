"""A body's fields before their values are looked at: known names, sizes, nulls.

null means absent. Values that ask for nothing (`suffix: ""`, `tools: []`) are honoured by doing
nothing; a field that is known but not honoured yet is refused, and so is one that is not known.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from services.gateway.bodies import (
    MAX_BAD_TEXTS,
    MAX_BANNED_TOKEN_IDS,
    MAX_MESSAGES,
    MAX_METADATA,
)
from services.gateway.field_errors import written
from services.gateway.stop_strings import MAX_STOP_STRINGS
from shared.errors import InvalidField, Unsupported
from shared.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES, MAX_STOP_TOKEN_IDS

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto",),
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "priority": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of which only these values are taken, because they ask for what happens anyway."""

REFUSED: Final = frozenset(
    ("audio", "chat_template", "chat_template_kwargs", "documents", "function_call", "functions",
     "guided_choice", "guided_grammar", "guided_json", "guided_regex", "kv_transfer_params",
     "logits_processors", "mm_processor_kwargs", "parallel_tool_calls", "prediction",
     "prompt_cache_key", "prompt_embeds", "reasoning_effort", "request_id", "safety_identifier",
     "spaces_between_special_tokens", "structured_outputs", "truncate_prompt_tokens", "verbosity",
     "web_search_options")
)  # fmt: skip
"""Fields of OpenAI or vLLM that this server does not have (yet); null is absent."""

ELSEWHERE: Final = {
    "prompt": "/v1/completions",
    "echo": "/v1/completions",
    "messages": "/v1/chat/completions",
    "max_completion_tokens": "/v1/chat/completions",
    "top_logprobs": "/v1/chat/completions",
    "add_generation_prompt": "/v1/chat/completions",
    "continue_final_message": "/v1/chat/completions",
}
"""Fields that only this one of the two endpoints has."""

REFUSED_INSIDE: Final = frozenset(
    ("name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call",
     "reasoning_content", "include_obfuscation")
)  # fmt: skip
"""Fields of messages and stream options that OpenAI or vLLM have and this server has not."""

_MOST: Final = (
    ("stop", MAX_STOP_STRINGS, "strings"),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids"),
    ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, "ids"),
    ("banned_token_ids", MAX_BANNED_TOKEN_IDS, "ids"),
    ("bad_words", MAX_BAD_TEXTS, "texts"),
    ("logit_bias", MAX_BIASES, "token ids"),
    ("messages", MAX_MESSAGES, "messages"),
    ("metadata", MAX_METADATA, "pairs"),
)
"""Checked before anything looks at the items."""


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Refuse lists that are too long to look at. Raises: InvalidField."""
    for name, most, items in _MOST:
        value = fields.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise InvalidField(name, f"takes at most {most} {items}, not {len(value)}")


def cleaned(
    fields: Mapping[str, Any], known: Collection[str], *, generates: bool = True
) -> dict[str, Any]:
    """Without nulls and, where it `generates`, neutral values.

    The first unknown name ends it: pydantic would make an error of each.
    Raises: InvalidField or Unsupported.
    """
    kept = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif generates and (name in NEUTRAL or name in REFUSED or name in ELSEWHERE):
            if value is None or any(_same(value, neutral) for neutral in NEUTRAL.get(name, ())):
                continue
            if name in ELSEWHERE:
                raise Unsupported(name, f"belongs to {ELSEWHERE[name]}; leave it out here")
            raise Unsupported(name)
        else:
            raise unknown(name)
    return kept


def cleaned_inside(
    fields: Mapping[str, Any], known: Collection[str], *where: str | int
) -> dict[str, Any]:
    """The same for an object inside the body, at `where`. Raises: InvalidField or Unsupported."""
    kept = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name not in REFUSED_INSIDE:
            raise unknown(*where, name)
        elif value is not None:
            raise Unsupported(written(*where, name))
    return kept


def unknown(*path: str | int) -> InvalidField:
    """The error of a name that nobody has."""
    return InvalidField(written(*path), "is not a field of this endpoint; leave it out")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
