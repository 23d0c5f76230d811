"""One request as it will be sent: a prompt, and how much of an answer is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent.

    `prompt_tokens` is its length by the bench's own tokenizer, without a chat template.
    """

    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    prompt_tokens: int
    num_choices: int = 1
    temperature: float = 0.0
    seed: int | None = None

    @property
    def text(self) -> str:
        """The prompt for an endpoint that knows no roles."""
        return "\n".join(message["content"] for message in self.messages)


class Text(Protocol):
    """What the workloads ask of a tokenizer."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, with what the model wants around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are left out."""

    def plain_ids(self) -> Sequence[int]:
        """Ids that stand for printable text of their own, in ascending order."""


def of_user(text: str, max_tokens: int, prompt_tokens: int) -> Planned:
    """A request of one user message."""
    return Planned(({"role": "user", "content": text},), max_tokens, prompt_tokens)


Json = dict[str, Any]
