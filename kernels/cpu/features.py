"""What this CPU can do."""

from functools import cache
from pathlib import Path

_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Names in /proc/cpuinfo: x86 (AVX512_BF16, AMX), and Arm's bf16 dot products."""


@cache
def has_fast_bf16() -> bool:
    """True where bfloat16 products are instructions; emulation, slower than float32, is no."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return not _BF16_FLAGS.isdisjoint(next(flags, "").split())
