"""Compile the CPU bodies to machine code with numba. Imported only when the cache has none."""

from collections.abc import Callable
from typing import Any, Final

import torch
from numba.core import types
from numba.core.ccallback import CFunc

from kernels.cpu.attention import list_work, make_attend
from kernels.cpu.elementwise import make_norm, make_rotate, make_silu
from kernels.cpu.features import has_tiles
from kernels.cpu.product import make_products
from kernels.cpu.vector import OPTIONS

MAKERS: Final = {
    "list_work": lambda is_bf16: list_work,
    "attend": make_attend,
    "norm": make_norm,
    "silu": make_silu,
    "rotate": make_rotate,
}
TILE_MAKERS: Final = {
    "products": lambda is_bf16: make_products(is_bf16, gives_f32=False),
    "logits": lambda is_bf16: make_products(is_bf16, gives_f32=True),
}


def compile_bodies(is_bf16: bool) -> dict[str, tuple[str, bytes]]:
    """Every body's symbol and object code, for this CPU; about 10 s."""
    makers: dict[str, Callable[[bool], Any]] = dict(MAKERS)
    if has_tiles(torch.bfloat16 if is_bf16 else torch.float32):
        makers.update(TILE_MAKERS)
    compiled = {}
    for name, make in makers.items():
        function: Any = CFunc(make(is_bf16), ((types.intp,), types.void), {}, dict(OPTIONS))
        function.compile()
        compiled[name] = (function.native_name, function._library._get_compiled_object())
    return compiled
