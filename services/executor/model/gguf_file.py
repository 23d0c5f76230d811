"""Weights from a GGUF file, dequantised by the gguf package piece by piece."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import gguf
import numpy as np
import torch
from torch import Tensor

from shared.errors import StartError
from shared.gguf_header import TensorPlace, read_header

CHUNK_ELEMENTS: Final = 2**20


@dataclass(frozen=True, slots=True)
class _Place:
    quantisation: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """One file: `metadata` and tensors by name.

    Raises: StartError if it cannot be read, is cut off, or holds what cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata = header.metadata
        size = path.stat().st_size
        self._places = {
            name: self._place(name, place, size) for name, place in header.tensors.items()
        }
        self._descriptor = os.open(path, os.O_RDONLY)

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

    def _place(self, name: str, place: TensorPlace, size: int) -> _Place:
        """What is there, if it can be read. `size`: of the file, in bytes."""
        shape = place.shape
        try:
            quantisation = gguf.GGMLQuantizationType(place.kind)
        except ValueError as error:
            raise StartError(f"{self.path}: tensor {name} has unknown type {place.kind}") from error
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
        rows, columns = _rows(shape)
        end = place.offset + rows * _bytes_of(columns, quantisation)
        if end > size:
            raise StartError(
                f"{self.path}: has {size} bytes, tensor {name} ends at {end}: "
                "the download is not complete"
            )
        return _Place(quantisation, shape, place.offset)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _bytes_of(elements: int, quantisation: gguf.GGMLQuantizationType) -> int:
    block_size, type_size = gguf.GGML_QUANT_SIZES[quantisation]
    return elements // block_size * type_size
