"""The header of a GGUF file: its metadata (form, tokenizer, chat template) and where tensors lie.

The `gguf` package reads it too, but needs numpy and makes an array of every token: 2 s and 190 MB
for 49,152 tokens, in the gateway and in the executor, against 0.04 s and 25 MB here
(docs/decisions/0004). What the numbers mean is left to that package.

Source: GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.errors import StartError

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q",
                   11: "q", 12: "d"}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_ENTRIES: Final = 65_536
_MAX_ARRAY_ITEMS: Final = 10_000_000
_MAX_ARRAY_DEPTH: Final = 4
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes begin, and what they are.

    Attributes:
        kind: the number of its ggml type (gguf.GGMLQuantizationType).
        shape: outermost dimension first.
        offset: of its first byte, from the start of the file.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a file but its numbers; arrays of numbers are tuples, of strings lists."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`.

    Raises: StartError if the file is no little-endian GGUF of version 2 or 3, or is cut off.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _Reader(content).header()
    except OSError as error:
        raise StartError(f"{path}: cannot be read ({error.strerror})") from error
    except (struct.error, ValueError) as error:
        raise StartError(f"{path}: no GGUF file this server can read ({error})") from error


class _Reader:
    """Walks the header; every read moves `_offset`."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._offset = 0

    def header(self) -> GgufHeader:
        if self._content[:4] != b"GGUF":
            raise ValueError("its first four bytes are not GGUF")
        self._offset = 4
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3, or the file is big-endian")
        num_tensors, num_entries = self._unpack("<QQ")
        for count, what in ((num_tensors, "tensors"), (num_entries, "metadata entries")):
            if count > _MAX_ENTRIES:
                raise ValueError(f"{count} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind, depth=0)
        places = dict(self._place() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r:.60}")
        base = -(-self._offset // alignment) * alignment
        return GgufHeader(
            metadata,
            {
                name: TensorPlace(kind, shape, base + offset)
                for name, (kind, shape, offset) in places.items()
            },
        )

    def _place(self) -> tuple[str, tuple[int, tuple[int, ...], int]]:
        name = self._string()
        (num_dimensions,) = self._unpack("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r:.60} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"<{num_dimensions}Q")))
        kind, offset = self._unpack("<IQ")
        return name, (kind, shape, offset)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at byte {self._offset}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, depth: int) -> Any:
        kind, count = self._unpack("<IQ")
        if count > _MAX_ARRAY_ITEMS:
            raise ValueError(f"an array of {count} items at byte {self._offset}")
        if kind in _SCALARS:
            return self._unpack(f"<{count}{_SCALARS[kind]}")
        return [self._value(kind, depth) for _ in range(count)]

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        end = self._offset + size
        if end > len(self._content):
            raise ValueError(f"the file ends inside a string at byte {self._offset}")
        text = self._content[self._offset : end].decode("utf-8", "surrogateescape")
        self._offset = end
        return text

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._content, self._offset)
        self._offset += struct.calcsize(form)
        return values
