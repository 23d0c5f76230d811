"""The forms in /openapi.json: those of bodies and answers, with one server's limits in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway import answer_models as answers
from services.gateway import bodies
from services.gateway import prefix_models as prefixes
from services.gateway.body_fields import (
    ELSEWHERE,
    IN_MESSAGES,
    IN_STREAM_OPTIONS,
    NEUTRAL,
    REFUSED,
)
from services.gateway.field_types import TOKEN_ID

SCHEMAS: Final = "#/components/schemas/"
_GENERATING: Final = (bodies.CompletionBody, bodies.ChatBody)
_INSIDE: Final = ((bodies.MessageBody, IN_MESSAGES), (bodies.StreamOptionsBody, IN_STREAM_OPTIONS))
_ABOUT_A_FIELD: Final = ("anyOf", "description", "title", "default", "deprecated")
_COUNTS: Final = ("max_tokens", "max_completion_tokens", "min_tokens")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the document says of this server; None: not known yet."""

    names: tuple[str, ...]
    vocab_size: int
    max_model_len: int | None
    needs_key: bool


def schemas_of(facts: Facts) -> dict[str, Any]:
    """All models by name, with this server's limits in them."""
    asked = (
        *_GENERATING, bodies.TokenizeTextBody, bodies.TokenizeChatBody, bodies.DetokenizeBody,
        prefixes.PrefixTextBody, prefixes.PrefixChatBody,
    )  # fmt: skip
    told = (
        answers.CompletionAnswer, answers.CompletionChunk, answers.ChatAnswer, answers.ChatChunk,
        answers.ModelCard, answers.ModelList,
        answers.TokenizeAnswer, answers.DetokenizeAnswer, answers.VersionAnswer, answers.Ready,
        answers.NotReady, answers.Live, answers.ErrorAnswer,
        prefixes.PrefixCard, prefixes.PrefixList, prefixes.PrefixDeleted,
    )  # fmt: skip
    _, all_schemas = models_json_schema(
        [(model, "validation") for model in (*asked, *told)], ref_template=SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = _with_vocabulary(all_schemas["$defs"], facts.vocab_size)
    for model in _GENERATING:
        properties = schemas[model.__name__]["properties"]
        properties |= _other_fields(model)
        if facts.max_model_len is not None:
            for name in properties.keys() & _COUNTS:
                properties[name]["maximum"] = facts.max_model_len - 1
    for inside, others in _INSIDE:
        schemas[inside.__name__]["properties"] |= {
            name: _only(values) if values else _refused() for name, values in others.items()
        }
    for body in asked:
        schemas[body.__name__]["properties"]["model"]["enum"] = [*facts.names, None]
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            field.pop("title", None)  # pydantic's: the name once more
            if field.get("default", ...) is None:
                del field["default"]  # absent; the description says what happens then
            _say_once(field)
    return schemas


def _other_fields(model: type[BaseModel]) -> dict[str, Any]:
    """What is known and has no field: neutral values are taken, null is absent."""
    others = {name: _only(values) for name, values in NEUTRAL.items()}
    for name in (REFUSED | ELSEWHERE.keys()) - model.model_fields.keys():
        others[name] = _refused()
    return dict(sorted(others.items()))


def _only(values: Sequence[Any]) -> dict[str, Any]:
    return {"enum": [*values, None], "description": "only what asks for nothing"}


def _refused() -> dict[str, Any]:
    return {"type": "null", "description": "not supported here", "deprecated": True}


def _say_once(field: dict[str, Any]) -> None:
    """Move the limits told beside a field's types into its first type, over what stands there."""
    limits = field.keys() - {*_ABOUT_A_FIELD, "enum"}
    if "anyOf" in field and limits:
        field["anyOf"][0] |= {name: field.pop(name) for name in sorted(limits)}


def _with_vocabulary(node: Any, vocab_size: int) -> Any:
    """`node` with the vocabulary's limit on every token id that a client sends."""
    if node == TOKEN_ID:
        return {**node, "maximum": vocab_size - 1}
    if isinstance(node, dict):
        return {name: _with_vocabulary(item, vocab_size) for name, item in node.items()}
    if isinstance(node, list):
        return [_with_vocabulary(item, vocab_size) for item in node]
    return node
