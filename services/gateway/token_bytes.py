"""The bytes that a token of a vocabulary stands for, by how the vocabulary writes bytes."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

TokenBytes: TypeAlias = Callable[[str], bytes]


def _bytes_to_unicode() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one printable character (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET: Final = _bytes_to_unicode()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level(token: str) -> bytes:
    """A token of a byte-level vocabulary (GPT-2, Llama 3, Qwen2, SmolLM).

    >>> byte_level("Ġworld"), byte_level("ä¸ĸ").decode()
    (b' world', '世')
    """
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token written as plain text
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """A token of a SentencePiece vocabulary with byte tokens (Llama 2, Mistral).

    >>> byte_fallback("▁world"), byte_fallback("<0x0A>")
    (b' world', b'\\n')
    """
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def of_decoder(decoder: Mapping[str, Any] | None) -> TokenBytes | None:
    """The rule that a tokenizer.json's `decoder` follows, or None if it is another one.

    SentencePiece's decoder also strips the space before the first word of a text. That word is in
    the prompt, so the rule for what is generated strips nothing (vLLM does the same).
    """
    if decoder is None:
        return None
    if decoder.get("type") == "ByteLevel":
        return byte_level
    if decoder.get("type") == "Sequence":
        parts = [part.get("type") for part in decoder.get("decoders", [])]
        if parts == ["ByteLevel"]:
            return byte_level
        if "ByteFallback" in parts and set(parts) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return byte_fallback
    return None
