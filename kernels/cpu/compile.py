"""Compile the CPU bodies to machine code with numba. Imported only when the cache has none."""

from typing import Any, Final

from numba.core import types
from numba.core.ccallback import CFunc

from kernels.cpu.attention import list_work, make_attend
from kernels.cpu.elementwise import make_norm, make_rotate, make_silu
from kernels.cpu.vector import OPTIONS

MAKERS: Final = {
    "list_work": lambda is_bf16: list_work,
    "attend": make_attend,
    "norm": make_norm,
    "silu": make_silu,
    "rotate": make_rotate,
}


def compile_bodies(is_bf16: bool) -> dict[str, tuple[str, bytes]]:
    """Every body's symbol and object code, for this CPU; about 7 s."""
    compiled = {}
    for name, make in MAKERS.items():
        function: Any = CFunc(make(is_bf16), ((types.intp,), types.void), {}, dict(OPTIONS))
        function.compile()
        compiled[name] = (function.native_name, function._library._get_compiled_object())
    return compiled
