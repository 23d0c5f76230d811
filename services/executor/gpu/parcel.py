"""Arrays in one piece of memory, so that a step crosses to the device in one copy."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT: Final = 64
"""Bytes: kernels read whole vectors, and a graph's arrays must not move."""

_DTYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Parcel:
    """Arrays of any shapes, laid end to end in their order."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        self._starts: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            self._starts[name] = end
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    def write(self, memory: Tensor) -> None:
        """Copy the arrays into main memory, [num_bytes or more] uint8."""
        there = memory.numpy()
        for name, array in self._arrays.items():
            start = self._starts[name]
            place = there[start : start + array.nbytes]
            place[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, memory: Tensor) -> dict[str, Tensor]:
        """The arrays as views of memory, of any device, that they lie in."""
        return {
            name: memory[self._starts[name] : self._starts[name] + array.nbytes]
            .view(_DTYPES[array.dtype])
            .view(array.shape)
            for name, array in self._arrays.items()
        }
