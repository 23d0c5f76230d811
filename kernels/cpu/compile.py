"""Compile the CPU bodies to machine code with numba. Imported only when the cache has none."""

from collections.abc import Callable
from typing import Any, Final

import torch
from numba.core import types
from numba.core.ccallback import CFunc

from kernels.cpu.attention import list_work, make_attend
from kernels.cpu.copying import copy
from kernels.cpu.elementwise import make_norm, make_rotate, make_silu
from kernels.cpu.features import has_tiles
from kernels.cpu.product import make_embed, make_products
from kernels.cpu.team import follow, lead
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
    "embed": make_embed,
    "logits": lambda is_bf16: make_products(is_bf16, gives_f32=True),
}


def compile_bodies(kind: str) -> dict[str, tuple[str, bytes]]:
    """Symbol and object code of every body of a kind (bf16, f32, team); about 10 s for a dtype."""
    if kind == "team":
        functions: dict[str, Callable[[int], None]] = {"lead": lead, "follow": follow}
        functions |= {"nothing": nothing, "copy": copy}
    else:
        is_bf16 = kind == "bf16"
        makers: dict[str, Callable[[bool], Any]] = dict(MAKERS)
        if has_tiles(torch.bfloat16 if is_bf16 else torch.float32):
            makers.update(TILE_MAKERS)
        functions = {name: make(is_bf16) for name, make in makers.items()}
    return {name: _compile(function) for name, function in functions.items()}


def nothing(block: int) -> None:
    """A body with nothing to do."""


def _compile(function: Callable[[int], None]) -> tuple[str, bytes]:
    compiled: Any = CFunc(function, ((types.intp,), types.void), {}, dict(OPTIONS))
    compiled.compile()
    return compiled.native_name, compiled._library._get_compiled_object()
