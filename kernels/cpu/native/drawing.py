"""Tokens drawn from logits in C++: see `sampling.h`."""

import ctypes
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.native import library

DRAW: Final = np.dtype(library.Draw)
"""What is told of each draw. `logits` is the address of a row; `temperature` 0 is greedy."""


class NativeDraws:
    """Draws what the executor's sampler would draw."""

    def __init__(self, native: ctypes.CDLL | None = None) -> None:
        """`native` is the library to use, this CPU's own if it is None.

        Raises: NotBuilt if there is none.
        """
        self._native = library.native() if native is None else native

    def __call__(self, draws: NDArray[np.void], vocab_size: int) -> list[int]:
        """A token id for each of `draws`, or -1 if its logits are no distribution.

        Args:
            draws: [n] of `DRAW`; each row is [vocab_size] float32, contiguous, and stays alive.
            vocab_size: 1 at least.
        Raises: MemoryError if there is none to work in.
        """
        draws = np.ascontiguousarray(draws, DRAW)
        tokens = np.empty(len(draws), np.int64)
        outcome = self._native.splitflap_draw(
            draws.ctypes.data, len(draws), vocab_size, tokens.ctypes.data, torch.get_num_threads()
        )
        if outcome != library.DONE:
            raise MemoryError(f"no memory to draw {len(draws)} tokens")
        drawn: list[int] = tokens.tolist()
        return drawn
