"""A body's fields before their values are looked at: known names, sizes, nulls.

null means absent. Values that ask for nothing (`suffix: ""`, `tools: []`) are honoured by doing
nothing; a field that is known but not honoured yet is refused, and so is one that is not known.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from services.gateway.field_errors import written
from services.gateway.field_types import (
    MAX_BAD_TEXTS,
    MAX_BANNED_TOKEN_IDS,
    MAX_MESSAGES,
    MAX_METADATA,
)
from services.gateway.stop_strings import MAX_STOP_STRINGS
from shared.errors import InvalidField, Unsupported
from shared.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES, MAX_STOP_TOKEN_IDS

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of which only these values are taken, because they ask for what happens anyway."""

REFUSED: Final = frozenset(
    ("audio", "chat_template", "chat_template_kwargs", "documents", "function_call", "functions",
     "guided_choice", "guided_grammar", "guided_json", "guided_regex", "kv_transfer_params",
     "logits_processors", "mm_processor_kwargs", "prediction", "prompt_embeds",
     "reasoning_effort", "request_id", "structured_outputs", "truncate_prompt_tokens", "verbosity",
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

IN_MESSAGES: Final[dict[str, tuple[Any, ...]]] = {
    "type": ("text",),
    "tool_calls": ([],),
    "annotations": ([],),
    "name": (),
    "tool_call_id": (),
    "refusal": (),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
}
"""Fields of messages that OpenAI or vLLM have and this server has not; the values that ask for
nothing. So an answer's message, dumped by the official client, can be sent back."""

IN_STREAM_OPTIONS: Final[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
"""The same of stream options."""

_WORDS_FOR_BEAMS: Final = ("num_beams", "beam_width", "num_return_sequences")

_MAX_NAME_COMPARED: Final = 64
_CLOSE: Final = 0.75  # of difflib's likeness, 0 to 1: one or two letters of a name are wrong

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
            raise unknown(name, known=known)
    return kept


def cleaned_inside(
    fields: Mapping[str, Any],
    known: Collection[str],
    others: Mapping[str, tuple[Any, ...]],
    *where: str | int,
) -> dict[str, Any]:
    """The same for an object inside the body, at `where`; of `others`, with neutral values.

    Raises: InvalidField or Unsupported.
    """
    kept = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name not in others:
            raise unknown(*where, name, known=known)
        elif value is not None and not any(_same(value, neutral) for neutral in others[name]):
            raise Unsupported(written(*where, name))
    return kept


def unknown(*path: str | int, known: Collection[str] = ()) -> InvalidField:
    """The error of a name that nobody has, and the one of `known` that may have been meant."""
    name = str(path[-1])
    near = get_close_matches(name, known, 1, _CLOSE) if len(name) <= _MAX_NAME_COMPARED else ()
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    if name in _WORDS_FOR_BEAMS and "use_beam_search" in known:
        advice = "say use_beam_search and n"
    return InvalidField(written(*path), f"is not a field of this endpoint; {advice}")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
