"""Tokens drawn from logits, and what logits tell, in C++: see `sampling.h` and `likeliest.h`."""

import ctypes
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.native import library

DRAW: Final = np.dtype(library.Draw)
"""What is told of each draw. `logits` is the address of a row; `temperature` 0 is greedy;
`adjustment` is the address of an `ADJUSTMENT` or 0."""

ADJUSTMENT: Final = np.dtype(library.Adjustment)
"""What is done to the logits first. Lists of ids are the address of int32 and their number."""

ASK: Final = np.dtype(library.Ask)
"""What is asked of a row: `top` is the address of room for `num_top` int32. `total`, `rank` and
`peak` are the answer."""


class NativeDraws:
    """Draws what the executor's sampler would draw, and tells what its NumPy would."""

    def __init__(self, native: ctypes.CDLL | None = None) -> None:
        """`native` is the library to use, this CPU's own if it is None.

        Raises: NotBuilt if there is none.
        """
        self._native = library.native() if native is None else native
        self.num_draws = self.num_answers = 0
        """How many tokens were drawn, and asks answered, so far."""

    def __call__(self, draws: NDArray[np.void], vocab_size: int) -> list[int]:
        """A token id for each of `draws`, or -1 if nothing can be drawn from its logits.

        Args:
            draws: [n] of `DRAW`; each row is [vocab_size] float32, contiguous, and stays alive,
                as does all else that has an address.
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
        self.num_draws += len(draws)
        drawn: list[int] = tokens.tolist()
        return drawn

    def answer(self, asks: NDArray[np.void], vocab_size: int) -> None:
        """Answer each of `asks`, [n] of `ASK`, in place; rows as `__call__` wants them.

        Raises: MemoryError if there is none to work in.
        """
        outcome = self._native.splitflap_tell(
            asks.ctypes.data, len(asks), vocab_size, torch.get_num_threads()
        )
        if outcome != library.DONE:
            raise MemoryError(f"no memory to answer {len(asks)} asks")
        self.num_answers += len(asks)
