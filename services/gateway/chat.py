"""Messages to the text a chat model was trained on, by its own template.

The template is rendered in a process of its own (`template_worker`), which ends if it takes too
long or too much memory; the next conversation starts another one.
"""

import contextlib
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from services.gateway import template_worker
from services.gateway.call import Chat
from services.gateway.template_worker import CPU_S
from services.gateway.tokenizer import ChatFormat
from shared.child_process import command, environment
from shared.errors import InvalidField, SplitflapError, StartError
from shared.logs import get_logger

_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers'; a trimming template takes the space
_PATIENCE_S: Final = 60.0  # for a worker that gets no CPU; one that takes too much of it ends first
# No keys are among them.
_ITS_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TZ", "LANG", "LC_ALL")

_log = get_logger("chat")


class _TemplateRefuses(SplitflapError):
    """What the template, or jinja2, says."""


class _WorkerDied(SplitflapError):
    """The template took too much of something, or its process was killed."""


class ChatTemplate:
    """A model's chat template. Threads may share it; `close` it when done."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._form = {
            "template": chat_format.template,
            "special_tokens": dict(chat_format.special_tokens),
        }
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._end_worker: Callable[[], object] = _nothing

    def check(self) -> None:
        """Have it compiled, before anybody asks. Raises: StartError if it is no jinja2."""
        with self._lock:
            try:
                self._compiled()
            except (_TemplateRefuses, _WorkerDied) as error:
                raise StartError(f"the model's chat template cannot be read: {error}") from error

    def close(self) -> None:
        """End its process, if there is one."""
        with self._lock:
            self._end()

    def render(self, chat: Chat) -> str:
        """The prompt that a conversation is.

        With `continue_final_message` it ends where the last message ends (marked by a tag that
        goes through the template with it, as in transformers).
        Raises: InvalidField if the template refuses the messages (roles, their order), or takes too
        much time or memory for them.
        """
        messages = [dict(message) for message in chat.messages]
        final = messages[-1]["content"]
        if chat.continue_final_message:
            messages[-1]["content"] += _HERE
        text = self._render(messages, chat.add_generation_prompt)
        if chat.continue_final_message:
            text = _up_to_here(text, final)
        if not text:
            raise InvalidField("messages", "the model's chat template makes an empty prompt")
        return text

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        question = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            try:
                return self._compiled().ask(question)
            except _TemplateRefuses as error:
                raise InvalidField(
                    "messages", f"the model's chat template refuses them: {error}"
                ) from error
            except _WorkerDied as error:
                self._end()
                _log.error("chat_template_killed", messages=len(messages))
                raise InvalidField(
                    "messages",
                    f"the model's chat template took over {CPU_S:g} s for them, or its process "
                    "was killed: send fewer or shorter ones",
                ) from error

    def _compiled(self) -> "_Worker":
        """A worker that has read the template. Raises: _TemplateRefuses, _WorkerDied."""
        if self._worker is None:
            worker = _Worker()
            self._end_worker = weakref.finalize(self, worker.end)
            try:
                worker.ask(self._form)
            except SplitflapError:
                self._end()
                raise
            self._worker = worker
        return self._worker

    def _end(self) -> None:
        self._end_worker()
        self._worker = None


class _Worker:
    """A process that renders, and the socket to it."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                command(template_worker.__name__),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the gateway, which has answers to finish
            )
        ours.settimeout(_PATIENCE_S)
        self._socket = ours
        self._stream: Any = ours.makefile("rwb")

    def ask(self, question: Any) -> str:
        """Raises: _TemplateRefuses, or _WorkerDied if nothing comes back."""
        try:
            template_worker.write(self._stream, question)
            answer = template_worker.read(self._stream)
        except OSError as error:
            raise _WorkerDied(f"{type(error).__name__} {error}") from error
        if answer is None:
            raise _WorkerDied("it took too much time or memory")
        if "error" in answer:
            raise _TemplateRefuses(answer["error"])
        return str(answer["text"])

    def end(self) -> None:
        """Whatever it does just now."""
        with contextlib.suppress(OSError):  # what it was not told yet
            self._stream.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _nothing() -> None:
    """There is no worker to end."""


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ITS_ENVIRONMENT if name in os.environ}
    return environment(kept)


def _up_to_here(text: str, final: str) -> str:
    place = text.rfind(_HERE.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidField(
            "continue_final_message", "the model's chat template leaves the last message out"
        )
    if text.startswith(_HERE, place):
        return text[:place]
    return text[:place].rstrip()  # the template trims its messages
