"""Huge pages for big tensors: one entry of the processor's page cache for 2 MiB, not 4 KiB."""

import ctypes
import sys
from typing import Final

from torch import Tensor

HUGE_PAGE: Final = 2 * 2**20
_MADV_HUGEPAGE: Final = 14


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
