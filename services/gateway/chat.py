"""Messages to the text a chat model was trained on, by its own template.

The sandbox and the names in it are those of transformers (chat_template_utils), which is not
imported: it would bring torch along (300 MB and seconds) where torch is installed.
"""

import json
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.gateway.call import Chat
from services.gateway.tokenizer import ChatFormat
from shared.errors import InvalidField, StartError

_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers'; a trimming template takes the space


class ChatTemplate:
    """A compiled chat template.

    Raises: StartError if it is no jinja2.
    """

    def __init__(self, chat_format: ChatFormat) -> None:
        try:
            self._template = _environment().from_string(chat_format.template)
        except jinja2.TemplateError as error:
            raise StartError(f"the model's chat template cannot be read: {error}") from error
        self._special_tokens = dict(chat_format.special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt that a conversation is.

        With `continue_final_message` it ends where the last message ends (marked by a tag that
        goes through the template with it, as in transformers).
        Raises: InvalidField if the template refuses the messages (roles, their order).
        """
        messages = [dict(message) for message in chat.messages]
        final = messages[-1]["content"]
        if chat.continue_final_message:
            messages[-1]["content"] += _HERE
        text = self._render(messages, add_generation_prompt=chat.add_generation_prompt)
        if chat.continue_final_message:
            text = _up_to_here(text, final)
        if not text:
            raise InvalidField("messages", "the model's chat template makes an empty prompt")
        return text

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidField(
                "messages", f"the model's chat template refuses them: {str(error)[:300]}"
            ) from error


def _up_to_here(text: str, final: str) -> str:
    place = text.rfind(_HERE.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidField(
            "continue_final_message", "the model's chat template leaves the last message out"
        )
    if text.startswith(_HERE, place):
        return text[:place]
    return text[:place].rstrip()  # the template trims its messages


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training: here, just the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's escaping of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
