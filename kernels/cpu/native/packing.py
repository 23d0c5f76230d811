"""A matrix as the native kernels multiply it: in tiles, of the back end's own dtype or of int8.

In int8 a weight w is stored as round(w / scale), scale = max|w| / 127 over its output's weights;
and so is a row of inputs when it comes to be multiplied, with a scale for each 64 of them. Products
of 64 are summed as whole numbers, exactly; these sums, times their scale, are added in their order:
a row's results do not depend, bit by bit, on the rows beside it or on threads.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.memory import Arena
from kernels.cpu.native import library
from kernels.interface import Quantization

_arena: Final = Arena()


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight matrix in tiles, and the struct that points to them.

    Attributes:
        dtype: of inputs, and of outputs that are no logits.
        memory: what `matrix` points to.
    """

    matrix: library.Matrix
    dtype: torch.dtype
    memory: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        native: ctypes.CDLL,
        dtype: torch.dtype,
        quantization: Quantization | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> "Packed":
        """Pack `weight` [outputs, inputs] and `bias` [outputs]."""
        outputs, inputs = weight.shape
        matrix = library.Matrix(outputs=outputs, inputs=inputs)
        weight = weight.to(dtype).contiguous()
        pack = _pack if quantization is None else _pack_int8
        memory = pack(native, matrix, weight)
        if bias is not None:
            padded = torch.zeros(outputs + 2 * native.splitflap_lanes())
            padded[:outputs] = bias
            matrix.bias = padded.data_ptr()
            memory = (*memory, padded)
        return cls(matrix, dtype, memory)

    def multiply(self, native: ctypes.CDLL, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows, inputs] -> [rows, outputs] of `dtype`."""
        is_bf16 = int(self.dtype == torch.bfloat16)
        if is_bf16 and self.matrix.inputs % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x.contiguous()
        y = torch.empty((len(x), self.matrix.outputs), dtype=dtype)
        outcome = native.splitflap_multiply(
            is_bf16, self.matrix, x.data_ptr(), len(x), y.data_ptr(), int(dtype == self.dtype),
            torch.get_num_threads(),
        )  # fmt: skip
        library.raise_if_failed(outcome, len(x))
        return y


def _pack(native: ctypes.CDLL, matrix: library.Matrix, weight: Tensor) -> tuple[Tensor, ...]:
    """Fill in `matrix`; returns what it points to."""
    shape = matrix.outputs, matrix.inputs
    is_bf16 = int(weight.dtype == torch.bfloat16)
    tiles = _arena.empty((native.splitflap_packed_size(is_bf16, *shape),), weight.dtype)
    native.splitflap_pack(is_bf16, weight.data_ptr(), *shape, tiles.data_ptr())
    matrix.tiles = tiles.data_ptr()
    return (tiles,)


def _pack_int8(native: ctypes.CDLL, matrix: library.Matrix, weight: Tensor) -> tuple[Tensor, ...]:
    """The same in int8."""
    shape = matrix.outputs, matrix.inputs
    tiles = _arena.empty((native.splitflap_int8_size(*shape),), torch.int8)
    scales = _arena.empty((native.splitflap_int8_scales(matrix.outputs),), torch.float32)
    outcome = native.splitflap_pack_int8(
        int(weight.dtype == torch.bfloat16), weight.data_ptr(), *shape, tiles.data_ptr(),
        scales.data_ptr(),
    )  # fmt: skip
    library.raise_if_failed(outcome, matrix.outputs)
    matrix.tiles, matrix.scales = tiles.data_ptr(), scales.data_ptr()
    return tiles, scales
