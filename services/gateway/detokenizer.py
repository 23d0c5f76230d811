"""Token ids to text, as they come, never half a character."""

from codecs import utf_8_decode
from collections.abc import Iterable

from services.gateway.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing list of tokens.

    A character may be split over tokens: its first bytes are held until the rest comes. What can
    become no character is U+FFFD, as in the whole text's decoding. Text and hold-back depend on
    the list of tokens alone, not on how it was cut into calls.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._half = b""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        new = self._half + b"".join(map(self._bytes_of, token_ids))
        text, num_read = utf_8_decode(new, "replace", False)
        self._half = new[num_read:]
        return text

    @property
    def holds_half(self) -> bool:
        """Whether the first bytes of a character wait for its last."""
        return bool(self._half)

    def breaks_off(self, token_id: int) -> bool:
        """Whether this token, if it comes next, leaves a half character behind it: a U+FFFD."""
        begin = self._bytes_of(token_id)[:1]
        if not begin or not self.holds_half:
            return False
        try:
            utf_8_decode(self._half + begin, "strict", False)
        except UnicodeDecodeError:
            return True
        return False

    def flush(self) -> str:
        """The text ended: a half character still held becomes one U+FFFD."""
        text, _ = utf_8_decode(self._half, "replace", True)
        self._half = b""
        return text
