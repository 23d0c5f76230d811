"""Messages to the text a chat model was trained on, by its own template.

The sandbox and the names in it are those of transformers (chat_template_utils), which is not
imported: it would bring torch along (300 MB and seconds) where torch is installed.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.gateway.tokenizer import ChatFormat
from shared.errors import InvalidField, StartError


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

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks the model for the next assistant message.

        Raises: InvalidField if the template refuses the messages (roles, their order).
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidField(
                "messages", f"the model's chat template refuses them: {str(error)[:300]}"
            ) from error
        if not text:
            raise InvalidField("messages", "the model's chat template makes an empty prompt")
        return text


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
