"""What this CPU can do."""

from functools import cache

import llvmlite.binding as llvm
import torch


@cache
def _features() -> frozenset[str]:
    """LLVM's names of the instruction sets this CPU has."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def has_fast_bf16() -> bool:
    """True where bfloat16 products are instructions; emulation, slower than float32, is no."""
    return not _features().isdisjoint(("avx512bf16", "amx-bf16", "bf16"))


def has_tiles(dtype: torch.dtype) -> bool:
    """True where our own matrix products are the fastest: AVX-512, unless it has matrix tiles."""
    if dtype == torch.bfloat16:
        return "avx512bf16" in _features() and "amx-bf16" not in _features()
    return dtype == torch.float32 and "avx512f" in _features()
