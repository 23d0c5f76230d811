"""Messages as they come in a body: null fields left out, content parts joined to one text."""

from typing import Any, Final

from services.gateway.bodies import ConversationBody, MessageBody
from services.gateway.body_fields import cleaned_inside, unknown
from services.gateway.call import Chat
from services.gateway.field_errors import written
from shared.errors import InvalidField, Unsupported

_BETWEEN_PARTS: Final = "\n"  # as vLLM, TensorRT-LLM and LMDeploy join them


def cleaned_messages(messages: list[Any]) -> list[Any]:
    """Ready for `MessageBody`. Raises: InvalidField or Unsupported, naming the place."""
    return [
        _cleaned(message, index) if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def chat_of(body: ConversationBody) -> Chat:
    """The conversation to render. Raises: InvalidField if its options contradict one another."""
    adds = body.add_generation_prompt is not False
    continues = bool(body.continue_final_message)
    if continues and adds:
        raise InvalidField("continue_final_message", "needs add_generation_prompt: false")
    if continues and body.messages[-1].role != "assistant":
        raise InvalidField(
            "continue_final_message",
            f"needs a last message of the assistant, not of the {body.messages[-1].role}",
        )
    messages = tuple([{"role": each.role, "content": each.content} for each in body.messages])
    return Chat(messages, adds, continues)


def _cleaned(message: dict[str, Any], index: int) -> dict[str, Any]:
    kept = cleaned_inside(message, MessageBody.model_fields, "messages", index)
    if isinstance(content := kept.get("content"), list):
        where = ("messages", index, "content")
        if not content:
            raise InvalidField(written(*where), "is empty; give a text or at least one part")
        texts = [_text_of(part, (*where, number)) for number, part in enumerate(content)]
        kept["content"] = _BETWEEN_PARTS.join(texts)
    return kept


def _text_of(part: Any, where: tuple[str | int, ...]) -> str:
    if not isinstance(part, dict):
        raise InvalidField(written(*where), 'must be an object: {"type": "text", "text": ...}')
    if part.get("type") is None:
        raise InvalidField(written(*where, "type"), "is required")
    if part["type"] != "text":
        raise Unsupported(
            written(*where, "type"), "other than text is not supported by this server yet"
        )
    for name in part:
        if name not in ("type", "text"):
            raise unknown(*where, name)
    text = part.get("text")
    if not isinstance(text, str):
        said = "is required" if text is None else "must be a string"
        raise InvalidField(written(*where, "text"), said)
    return text
