"""Big tensors on huge pages: one entry of the processor's page cache for 2 MiB, not 4 KiB.

Weights and pools are read from end to end every step; on small pages a step takes 8 to 20 % longer.
"""

import ctypes
import sys
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 * 2**20
CHUNK_BYTES: Final = 64 * 2**20
_CACHE_LINE: Final = 64
_MADV_HUGEPAGE: Final = 14


class Arena:
    """Tensors side by side in chunks of huge pages; memory nobody has written costs nothing."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of `shape`, not cleared; its chunk lives as long as any tensor in it."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._used + size > self._chunk.numel():
            self._chunk = torch.empty(max(CHUNK_BYTES, size) + HUGE_PAGE, dtype=torch.uint8)
            self._used = -self._chunk.data_ptr() % HUGE_PAGE
            advise_huge_pages(self._chunk)
        tensor = self._chunk[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _CACHE_LINE) * _CACHE_LINE
        return tensor


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for huge pages under a tensor not touched yet; it may say no."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if end > start:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(start, end - start, _MADV_HUGEPAGE)
