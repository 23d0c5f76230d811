"""Text to token ids, and each token id to the bytes it stands for.

Special-token text (`<|im_end|>` typed by a client) is read as the special token, in completion
prompts and in chat messages alike, as transformers and vLLM do by default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import tokenizers

from services.gateway.token_bytes import TokenBytes
from shared.model_source import ModelSource


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A model's chat template (jinja2) and the special tokens it may name, as text."""

    template: str
    special_tokens: Mapping[str, str]


class Tokenizer(Protocol):
    """What the gateway asks of a model's vocabulary."""

    vocab_size: int
    """Ids this tokenizer knows are 0 .. vocab_size - 1; the model may have more."""

    longest_token_bytes: int
    """A text of b bytes has at least b / longest_token_bytes tokens."""

    chat: ChatFormat | None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens` puts what the model wants around it (BOS)."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for special tokens and unknown ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole list of tokens, special ones written out, unknown ones left out."""

    def name_of(self, token_id: int) -> str:
        """How the vocabulary writes a token; "" for unknown ids."""


class ModelTokenizer:
    """A tokenizer of the `tokenizers` library, from a Hugging Face folder or a GGUF file."""

    def __init__(
        self, core: tokenizers.Tokenizer, token_bytes: TokenBytes, chat: ChatFormat | None
    ) -> None:
        vocabulary = core.get_vocab(with_added_tokens=True)
        self._core = core
        self._token_bytes = token_bytes
        self._cache: dict[int, bytes] = {}
        self._special = {
            token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special
        }
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token_bytes = max(len(token.encode()) for token in vocabulary)
        self.chat = chat

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`. Lets other threads run meanwhile (`encode` alone would not)."""
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for special tokens and unknown ids."""
        known = self._cache.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._core.id_to_token(token_id)
            known = self._token_bytes(token) if token is not None else b""
            self._cache[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the library decodes: a SentencePiece text loses the space before its first word."""
        # the library takes no id beyond 32 bits
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        return str(self._core.decode(known, skip_special_tokens=False))

    def name_of(self, token_id: int) -> str:
        """How the vocabulary writes a token; "" for unknown ids."""
        return str(self._core.id_to_token(token_id) or "") if token_id < self.vocab_size else ""


TOY_CHAT: Final = ChatFormat(
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    {},
)


class ToyTokenizer:
    """The toy model's: ids 0..255 are the raw bytes, 256 ends a text, 257 begins one (unused)."""

    vocab_size = 258
    longest_token_bytes = 1
    chat: ChatFormat | None = TOY_CHAT

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The UTF-8 bytes of `text`."""
        return tuple(text.encode())

    def bytes_of(self, token_id: int) -> bytes:
        """The byte itself."""
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The bytes as text; what is no UTF-8 becomes U+FFFD."""
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="replace")

    def name_of(self, token_id: int) -> str:
        """A byte as `<0x41>`."""
        return f"<0x{token_id:02X}>" if 0 <= token_id < 256 else ""


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model.

    Raises: StartError if the model has none, or one of a kind this server does not know.
    """
    if source.is_toy:
        return ToyTokenizer()
    if source.kind == "gguf":
        from services.gateway.gguf_tokenizer import from_gguf

        return from_gguf(source.path)
    from services.gateway.folder_tokenizer import from_folder

    return from_folder(source.path)
