"""The JSON of answers and of a stream's events, for both endpoints."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.gateway import sse
from services.gateway.call import Endpoint
from services.gateway.event_id import event_id
from services.gateway.json_portions import LongList
from services.gateway.kv_bill import bill_fields
from shared.ids import RequestId
from shared.messages import KVBill

PREFIXES: Final[dict[Endpoint, str]] = {"completion": "cmpl-", "chat": "chatcmpl-"}
_WHOLE: Final[dict[Endpoint, str]] = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK: Final[dict[Endpoint, str]] = {
    "completion": "text_completion",
    "chat": "chat.completion.chunk",
}


def new_request_id(endpoint: Endpoint, random_hex: str) -> RequestId:
    """`cmpl-...` or `chatcmpl-...`; never a client's own id."""
    return RequestId(PREFIXES[endpoint] + random_hex)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended: OpenAI's finish_reason, and what stopped it (vLLM's stop_reason)."""

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What all objects of one answer share.

    `extras` are the fields that only some requests ask for, such as `token_ids`.
    """

    endpoint: Endpoint
    request_id: RequestId
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: LongList, usage: dict[str, Any], **extras: Any) -> dict[str, Any]:
        """The answer in one piece."""
        return {**self._head(_WHOLE), "choices": choices, "usage": usage, **extras}

    def whole_choice(
        self,
        index: int,
        text: str,
        ending: Ending,
        logprobs: dict[str, Any] | None = None,
        **extras: Any,
    ) -> dict[str, Any]:
        """One choice of an answer in one piece."""
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"text": text} if self.endpoint == "completion" else {"message": message}
        return {"index": index, **content, **_tail(logprobs, ending), **extras}

    def chunk(self, choices: Sequence[dict[str, Any]] | LongList, **extras: Any) -> dict[str, Any]:
        """An object of a stream: it has one choice, or none and the usage."""
        return {**self._head(_CHUNK), "choices": choices, **extras}

    def role(self, index: int, **extras: Any) -> dict[str, Any]:
        """A chat's first choice in a stream: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, **_tail(None, None), **extras}

    def text(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, **extras: Any
    ) -> dict[str, Any]:
        """More text of a choice."""
        content = {"text": text} if self.endpoint == "completion" else {"delta": {"content": text}}
        return {"index": index, **content, **_tail(logprobs, None), **extras}

    def end(
        self, index: int, ending: Ending, logprobs: dict[str, Any] | None = None, **extras: Any
    ) -> dict[str, Any]:
        """The last of a choice in a stream; `logprobs` are of tokens that are no text."""
        content: dict[str, Any] = {"text": ""} if self.endpoint == "completion" else {"delta": {}}
        return {"index": index, **content, **_tail(logprobs, ending), **extras}

    def event(self, fields: dict[str, Any], positions: Sequence[str]) -> bytes:
        """An object as an event; `positions` of all choices, after it, are its id."""
        return sse.event(fields, event_id(self.request_id, positions))

    def event_portions(self, fields: dict[str, Any], positions: Sequence[str]) -> Iterator[bytes]:
        """The same, of fields that hold a `LongList`."""
        return sse.event_portions(fields, event_id(self.request_id, positions))

    def _head(self, names: dict[Endpoint, str]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": names[self.endpoint],
            "created": self.created,
            "model": self.model,
        }


def _tail(logprobs: dict[str, Any] | None, ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"logprobs": logprobs, "finish_reason": None}
    return {
        "logprobs": logprobs,
        "finish_reason": ending.finish_reason,
        "stop_reason": ending.stop_reason,
    }


def usage_fields(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    bills: Sequence[KVBill] = (),
) -> dict[str, Any]:
    """OpenAI's `usage`; while a stream goes on it is not known yet what was cached.

    `bills` are those of the answer's requests, if the scheduler keeps any.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if bills:
        usage["kv_bill"] = bill_fields(bills)
    return usage
