"""The JSON of answers and of a stream's events, for both endpoints."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.gateway import sse
from services.gateway.call import Endpoint
from shared.ids import RequestId

_PREFIX: Final[dict[Endpoint, str]] = {"completion": "cmpl-", "chat": "chatcmpl-"}
_WHOLE: Final[dict[Endpoint, str]] = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK: Final[dict[Endpoint, str]] = {
    "completion": "text_completion",
    "chat": "chat.completion.chunk",
}


def new_request_id(endpoint: Endpoint, random_hex: str) -> RequestId:
    """`cmpl-...` or `chatcmpl-...`; never a client's own id."""
    return RequestId(_PREFIX[endpoint] + random_hex)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended: OpenAI's finish_reason, and what stopped it (vLLM's stop_reason)."""

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What all objects of one answer share."""

    endpoint: Endpoint
    request_id: RequestId
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[tuple[str, Ending]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece: (text, ending) per choice."""
        return {
            **self._head(_WHOLE),
            "choices": [self._whole_choice(index, *choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }

    def role(self, index: int) -> dict[str, Any]:
        """A chat's first event: who speaks."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, index: int, text: str) -> dict[str, Any]:
        """More text of a choice."""
        content = {"text": text} if self.endpoint == "completion" else {"delta": {"content": text}}
        return self._chunk(index, content, None)

    def end(self, index: int, ending: Ending) -> dict[str, Any]:
        """A choice's last event."""
        content: dict[str, Any] = {"text": ""} if self.endpoint == "completion" else {"delta": {}}
        return self._chunk(index, content, ending)

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """A stream's last object, when it was asked for."""
        return {**self._head(_CHUNK), "choices": [], "usage": usage}

    def event(self, fields: dict[str, Any], positions: Sequence[int]) -> bytes:
        """An object as an event; `positions` are the tokens of each choice behind its text."""
        where = ".".join(map(str, positions))
        return sse.event(fields, f"{self.request_id}:{where}")

    def _head(self, names: dict[Endpoint, str]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": names[self.endpoint],
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, index: int, content: dict[str, Any], ending: Ending | None) -> dict[str, Any]:
        choice = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": ending.finish_reason if ending else None,
        }
        if ending is not None:
            choice["stop_reason"] = ending.stop_reason
        return {**self._head(_CHUNK), "choices": [choice]}

    def _whole_choice(self, index: int, text: str, ending: Ending) -> dict[str, Any]:
        content = (
            {"text": text}
            if self.endpoint == "completion"
            else {"message": {"role": "assistant", "content": text}}
        )
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": ending.finish_reason,
            "stop_reason": ending.stop_reason,
        }


def usage_fields(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
