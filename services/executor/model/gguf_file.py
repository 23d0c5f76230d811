"""Weights and metadata from a GGUF file.

The header is read here, skipping the vocabulary: the gguf package's own reader builds an array per
token (3 s and 160 MB for 49,152 tokens). The numbers are dequantised by the gguf package.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import gguf
import numpy as np
import torch
from torch import Tensor

from shared.errors import StartError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
LONGEST_KEPT_ARRAY: Final = 64
MAX_STRING_BYTES: Final = 16 * 2**20
CHUNK_ELEMENTS: Final = 2**20

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q",
                   11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Place:
    quantisation: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """One file: `metadata` (numbers, strings, short arrays) and tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        try:
            self._file = path.open("rb", buffering=2**20)
        except OSError as error:
            raise StartError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise
        self._descriptor = self._file.fileno()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, outermost dimension first."""
        return {name: place.shape for name, place in self._places.items()}

    def read_into(self, name: str, destination: Tensor) -> None:
        """Dequantise the tensor `name` into `destination` (contiguous, same number of elements)."""
        place = self._places[name]
        rows, columns = _rows(place.shape)
        row_bytes = _bytes_of(columns, place.quantisation)
        target = destination.view(rows, columns)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = self._read(place.offset + start * row_bytes, count * row_bytes)
            numbers = gguf.dequantize(raw.reshape(count, row_bytes), place.quantisation)
            numbers = np.ascontiguousarray(numbers, dtype=np.float32)
            target[start : start + count] = torch.from_numpy(numbers)

    def _read(self, offset: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw = np.empty(count, dtype=np.uint8)
        view = raw.data
        while view:
            got = os.preadv(self._descriptor, [view], offset)
            if got == 0:
                raise StartError(f"{self.path}: ends too early: the download is not complete")
            view, offset = view[got:], offset + got
        return raw

    def _read_header(self) -> None:
        header = _Header(self._file, self.path)
        if header.take(4) != MAGIC:
            raise StartError(f"{self.path}: is no GGUF file")
        version = header.number("I")
        if version not in VERSIONS:
            raise StartError(f"{self.path}: GGUF version {version} is not supported")
        num_tensors, num_keys = header.number("Q"), header.number("Q")
        for _ in range(num_keys):
            key = header.string()
            self.metadata[key] = header.value(header.number("I"))
        for _ in range(num_tensors):
            name = header.string()
            dimensions = [header.number("Q") for _ in range(header.dimension_count())]
            kind, offset = header.number("I"), header.number("Q")
            self._places[name] = self._place(name, kind, tuple(reversed(dimensions)), offset)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise StartError(f"{self.path}: general.alignment is {alignment!r:.60}")
        base = -(-self._file.tell() // alignment) * alignment
        size = self.path.stat().st_size
        for name, place in self._places.items():
            rows, columns = _rows(place.shape)
            end = base + place.offset + rows * _bytes_of(columns, place.quantisation)
            if end > size:
                raise StartError(
                    f"{self.path}: has {size} bytes, tensor {name} ends at {end}: "
                    "the download is not complete"
                )
            self._places[name] = _Place(place.quantisation, place.shape, base + place.offset)

    def _place(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> _Place:
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise StartError(f"{self.path}: tensor {name} has unknown type {kind}") from error
        place = _Place(quantisation, shape, offset)
        block_size = gguf.GGML_QUANT_SIZES[quantisation][0]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise StartError(
                f"{self.path}: tensor {name} has shape {shape}, which {quantisation.name} cannot"
            )
        try:
            empty = np.zeros((1, _bytes_of(block_size, quantisation)), dtype=np.uint8)
            gguf.dequantize(empty, quantisation)
        except NotImplementedError as error:
            raise StartError(
                f"{self.path}: tensor {name} is {quantisation.name}, which the gguf package "
                "cannot dequantise"
            ) from error
        return place

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Header:
    """Little-endian numbers and strings off the front of a file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    def take(self, count: int) -> bytes:
        taken = self._file.read(count)
        if len(taken) != count:
            raise StartError(f"{self._path}: its header ends too early")
        return taken

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def dimension_count(self) -> int:
        count = self.number("I")
        if count > 4:
            raise StartError(f"{self._path}: a tensor has {count} dimensions: a broken header")
        return count

    def string(self) -> str:
        return self.take(self._length()).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """One value; of an array over LONGEST_KEPT_ARRAY only None: it is skipped."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise StartError(f"{self._path}: metadata has unknown type {kind}: a broken header")
        item_kind, count = self.number("I"), self.number("Q")
        if count <= LONGEST_KEPT_ARRAY:
            return [self.value(item_kind) for _ in range(count)]
        if item_kind in _SCALARS:
            self._file.seek(count * struct.calcsize("<" + _SCALARS[item_kind]), os.SEEK_CUR)
        else:
            for _ in range(count):
                self._skip(item_kind)
        return None

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._file.seek(self._length(), os.SEEK_CUR)
        else:
            self.value(kind)

    def _length(self) -> int:
        length = self.number("Q")
        if length > MAX_STRING_BYTES:
            raise StartError(f"{self._path}: a string of {length} bytes: a broken header")
        return length


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _bytes_of(elements: int, quantisation: gguf.GGMLQuantizationType) -> int:
    block_size, type_size = gguf.GGML_QUANT_SIZES[quantisation]
    return elements // block_size * type_size
