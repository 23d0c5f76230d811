"""Tokens drawn in C++, with the threads that compute; what NumPy would draw (numpy_drawing.py)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.native.drawing import DRAW, NativeDraws
from shared.sampling import DrawParams

_TINY: Final = float(np.finfo(np.float32).tiny)


class NativeDrawing:
    """Draws with the native library."""

    def __init__(self, draws: NativeDraws) -> None:
        self._draws = draws

    def draw(
        self,
        rows: Sequence[NDArray[np.float32]],
        wishes: Sequence[DrawParams],
        dice: NDArray[np.float64],
    ) -> list[int | None]:
        """As `Drawing` says. Raises: MemoryError if there is none to work in."""
        if not rows:
            return []
        size = len(rows[0])
        told = np.empty(len(rows), DRAW)
        told["logits"] = [row.ctypes.data for row in rows]
        told["die"] = dice
        told["top_p"] = [params.top_p for params in wishes]
        told["top_k"] = [min(params.top_k, size) for params in wishes]
        told["min_p"] = [params.min_p for params in wishes]
        told["temperature"] = [
            max(params.temperature, _TINY) if params.temperature else 0.0 for params in wishes
        ]
        return [None if token < 0 else token for token in self._draws(told, size)]
