"""Weights from safetensors files: named tensors read straight into their place.

The format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range),
then the numbers. They are read, not mapped: mapped pages would count as memory of this process.
Source: https://huggingface.co/docs/safetensors (format).
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from shared.errors import StartError

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
                 "BF16": torch.bfloat16}  # fmt: skip
MAX_HEADER_BYTES: Final = 100_000_000  # as in the safetensors library
CHUNK_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """All tensors of a folder: one `model.safetensors`, or several named by its index."""

    def __init__(self, folder: Path) -> None:
        self._descriptors: dict[Path, int] = {}
        self._places: dict[str, _Place] = {}
        try:
            for file in _files(folder):
                self._descriptors[file] = os.open(file, os.O_RDONLY)
                self._read_header(file)
        except OSError as error:
            self.close()
            raise StartError(f"{error.filename}: cannot be read ({error.strerror})") from error
        except StartError:
            self.close()
            raise

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {name: place.shape for name, place in self._places.items()}

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy the tensor `name` into `destination` (contiguous, same number of elements)."""
        place = self._places[name]
        flat = destination.view(-1)
        step = CHUNK_BYTES // place.dtype.itemsize
        buffer = torch.empty(min(step, flat.numel()), dtype=place.dtype)
        for start in range(0, flat.numel(), step):
            count = min(step, flat.numel() - start)
            self._read(place, start * place.dtype.itemsize, buffer[:count])
            flat[start : start + count] = buffer[:count]

    def _read(self, place: _Place, offset: int, buffer: Tensor) -> None:
        view = buffer.view(torch.uint8).numpy().data
        descriptor, position = self._descriptors[place.file], place.offset + offset
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise StartError(f"{place.file}: ends too early: the download is not complete")
            view, position = view[count:], position + count

    def _read_header(self, file: Path) -> None:
        descriptor = self._descriptors[file]
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise StartError(f"{file}: is no safetensors file, or its download is not complete")
        try:
            header = json.loads(os.pread(descriptor, length, 8))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add(file, name, entry, 8 + length, size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StartError(f"{file}: has a broken header ({error!r:.200})") from error

    def _add(self, file: Path, name: str, entry: dict[str, Any], base: int, size: int) -> None:
        dtype, shape = entry["dtype"], tuple(int(length) for length in entry["shape"])
        begin, end = entry["data_offsets"]
        if dtype not in DTYPES:
            raise StartError(
                f"{file}: tensor {name} has dtype {dtype}; supported are {', '.join(DTYPES)}"
            )
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize or begin < 0:
            raise StartError(f"{file}: tensor {name} has {end - begin} bytes for shape {shape}")
        if base + end > size:
            raise StartError(
                f"{file}: has {size} bytes, tensor {name} ends at {base + end}: "
                "the download is not complete"
            )
        if name in self._places:
            raise StartError(f"{file}: tensor {name} is also in {self._places[name].file}")
        self._places[name] = _Place(file, DTYPES[dtype], shape, base + begin)

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights, from the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StartError(f"{index}: is no valid index ({error!r:.200})") from error
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise StartError(f"{index}: names files outside its folder")
        files = [folder / name for name in sorted(names)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise StartError(f"{folder}: {', '.join(missing)} named by {index.name} is missing")
        return files
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise StartError(
            f"{folder}: has only pickled weights (.bin, .pt), which can run code and are never "
            "loaded: convert them to safetensors"
        )
    raise StartError(f"{folder}: has no model.safetensors and no {index.name}")
