"""A process that renders one chat template, and nothing else: `python -m` it, a socket as stdin.

A template comes with the model's files, so it may be anybody's. jinja2's sandbox keeps it from the
names of Python; this process keeps its time and memory from the gateway: a loop without an end, a
power of powers or a string of gigabytes ends the process, which the kernel sees to.

Each question and each answer is four bytes of length, little-endian, and JSON. The first question
is {"template", "special_tokens"}, the others {"messages", "add_generation_prompt"}; an answer is
{"text"} or {"error"}. The sandbox and the names in it are those of transformers
(chat_template_utils), which is not imported: it would bring torch along.
"""

import json
import resource
import signal
import socket
import sys
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

CPU_S: Final = 2.0  # one question may take; whole conversations take milliseconds
MEMORY_BYTES: Final = 2**30  # of address space
MAX_TEXT_CHARACTERS: Final = 2**24
LENGTH_BYTES: Final = 4


def main() -> None:
    """Answer until the other end hangs up."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as peer:
        stream = peer.makefile("rwb")
        template: jinja2.Template | None = None
        special_tokens: dict[str, str] = {}
        while (question := read(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends it
            try:
                if template is None:
                    template = environment().from_string(question["template"])
                    special_tokens = question["special_tokens"]
                    answer = {"text": ""}
                else:
                    answer = {"text": _render(template, **special_tokens, **question)}
            except MemoryError:
                answer = {"error": "it takes too much memory"}
            except Exception as error:  # noqa: BLE001 - a template may raise anything
                answer = {"error": str(error)[:300] or type(error).__name__}
            write(stream, answer)
            signal.setitimer(signal.ITIMER_PROF, 0)


def _render(template: jinja2.Template, **names: Any) -> str:
    parts, size = [], 0
    for part in template.generate(tools=None, documents=None, **names):
        parts.append(part)
        size += len(part)
        if size > MAX_TEXT_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_TEXT_CHARACTERS} characters of them")
    return "".join(parts)


def read(stream: Any) -> Any:
    """The next question or answer; None if the other end hung up."""
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    if len(head) < LENGTH_BYTES or len(body) < length:
        return None
    return json.loads(body)


def write(stream: Any, told: Any) -> None:
    """Send a question or an answer."""
    body = json.dumps(told).encode()
    stream.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    stream.flush()


# ------------------------------------------------------------------ the sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training: here, just the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """What templates find around them."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


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


if __name__ == "__main__":
    main()
