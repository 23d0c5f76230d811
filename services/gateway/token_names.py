"""How single tokens are written in an answer's log-probabilities."""

from services.gateway.tokenizer import Tokenizer


class TokenNames:
    """A token's own decoded text; special tokens, which are no text, by their names.

    One of these lives as long as an answer, and remembers what it has written.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._keys: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token stands for, or those of its name."""
        return self._tokenizer.bytes_of(token_id) or self._tokenizer.name_of(token_id).encode()

    def text(self, token_id: int) -> str:
        """A part of a character is U+FFFD, as in OpenAI's chats; `bytes_of` has the truth."""
        return self.bytes_of(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        r"""A part of a character is `bytes:\xe4\xb8`, as in OpenAI's completions: told apart."""
        known = self._keys.get(token_id)
        if known is None:
            known = self._keys[token_id] = _key(self.bytes_of(token_id))
        return known


def _key(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([_written(byte) for byte in raw])


def _written(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"
