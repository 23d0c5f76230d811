"""What a recording says: the texts of an answer with their times, or why it failed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.bench.event_stream import read_events
from services.bench.recording import Recording

_DONE: Final = b"[DONE]"
_STORY_CHARS: Final = 300
_ENDED_BADLY: Final = ("abort", "error")  # finish reasons


@dataclass(slots=True)
class Choice:
    """One answer to a prompt: when text came, which, and why it ended."""

    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


@dataclass(slots=True)
class Answer:
    """A request's answers, or its failure as (kind, story)."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Mapping[str, Any] | None = None
    failure: tuple[str, str] | None = None

    def fail(self, kind: str, story: str) -> None:
        """Note what went wrong; the first failure stays."""
        self.failure = self.failure or (kind, story[:_STORY_CHARS])


def read_answer(recording: Recording, num_choices: int) -> Answer:
    """Understand a finished recording. Only an answer that is whole has no failure."""
    answer = Answer(failure=recording.failure)
    if recording.status is not None and recording.status != 200:
        answer.failure = (f"HTTP {recording.status}", _body(recording)[:_STORY_CHARS])
        return answer
    is_done = False
    for time, data in read_events(recording.chunks):
        if data.strip() == _DONE:
            is_done = True
        elif data:
            _take_event(answer, time, data)
    if answer.failure is None:
        _check_whole(answer, recording, num_choices, is_done=is_done)
    return answer


def _check_whole(answer: Answer, recording: Recording, num_choices: int, *, is_done: bool) -> None:
    ended_badly = {
        choice.finish_reason
        for choice in answer.choices.values()
        if choice.finish_reason in _ENDED_BADLY
    }
    if not is_done and not answer.choices:
        answer.fail("no stream", f"{recording.content_type or 'no type'}: {_body(recording)}")
    elif not is_done:
        answer.fail("no [DONE]", "the stream ended without data: [DONE]")
    elif ended_badly:
        answer.fail(f"finish reason {min(filter(None, ended_badly))}", "the server gave up")
    elif not any(choice.times_s for choice in answer.choices.values()):
        answer.fail("no text", "the stream ended, and no text was in it")
    elif len(answer.choices) < num_choices:
        answer.fail("choices missing", f"n={num_choices} asked, {len(answer.choices)} came")


def _take_event(answer: Answer, time: float, data: bytes) -> None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        answer.fail("no JSON", f"an event that is no JSON object: {data[:200]!r}")
        return
    error = event.get("error") or (event if event.get("object") == "error" else None)
    if error:
        answer.fail("error in the stream", _message(error))
    if isinstance(event.get("usage"), dict):
        answer.usage = event["usage"]
    choices = event.get("choices")
    for part in choices if isinstance(choices, list) else ():
        if isinstance(part, dict):
            _take_part(answer, time, part)


def _take_part(answer: Answer, time: float, part: Mapping[str, Any]) -> None:
    index, delta, reason = part.get("index"), part.get("delta"), part.get("finish_reason")
    choice = answer.choices.setdefault(index if isinstance(index, int) else 0, Choice())
    if isinstance(reason, str):
        choice.finish_reason = reason
    said = delta if isinstance(delta, dict) else {}
    pieces = (said.get("content"), said.get("reasoning_content"), said.get("reasoning"))
    for text in (*pieces, part.get("text")):
        if text and isinstance(text, str):
            choice.times_s.append(time)
            choice.texts.append(text)
            return


def _body(recording: Recording) -> str:
    text = b"".join(chunk for _, chunk in recording.chunks).decode("utf-8", "replace").strip()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _message(body.get("error") or body) if isinstance(body, dict) else text


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)
