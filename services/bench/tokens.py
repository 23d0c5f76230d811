"""Text to tokens and back, with the tokenizers that the gateway knows."""

from collections.abc import Sequence
from functools import cached_property

from services.gateway.tokenizer import Tokenizer, load_tokenizer
from shared.model_source import find_model


class Tokens:
    """A model's tokenizer as the workloads want it (`plan.Text`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, with what the model wants around it."""
        return self._tokenizer.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are left out, half characters become U+FFFD."""
        return b"".join(map(self._tokenizer.bytes_of, ids)).decode("utf-8", "replace")

    def count(self, text: str) -> int:
        """Tokens of an answer, which has nothing around it."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def plain_ids(self) -> Sequence[int]:
        """Ids that stand for printable text of their own, in ascending order."""
        return self._plain_ids

    @cached_property
    def _plain_ids(self) -> Sequence[int]:
        return [i for i in range(self._tokenizer.vocab_size) if self._is_plain(i)]

    def _is_plain(self, token_id: int) -> bool:
        try:
            return self._tokenizer.bytes_of(token_id).decode().isprintable() and bool(
                self._tokenizer.bytes_of(token_id)
            )
        except UnicodeDecodeError:
            return False


def load_tokens(model: str) -> Tokens:
    """The tokenizer of a model; `model` is what `--model` of the server takes.

    Raises: StartError if there is none.
    """
    return Tokens(load_tokenizer(find_model(model)))
