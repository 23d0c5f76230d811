"""Repairs of Triton's interpreter, 3.6 to 3.9: what it computes otherwise than a GPU.

- A product (`tl.dot`) of bfloat16 multiplies bit patterns.
- float32 to bfloat16 cuts off instead of rounding to the nearest.
- To float8 e4m3fn some numbers are rounded wrongly, and too large ones do not saturate.
- Triton 3.6 cannot count a loop whose bounds it loaded, with numpy 2.4 or later.

Only where kernels are interpreted: `install()` before any of them runs. A check of the tests says
so when one is no longer needed. And a call of one kernel function by another does not patch the
whole language anew, which its launch has done: ten times as fast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.interpreter import InterpreterBuilder as Builder

_TYPES: Final = {
    tl.float16: (torch.float16, np.float16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float32: (torch.float32, np.float32),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}
_dot, _cast, _convert = Builder.create_dot, Builder.cast_impl, Builder.create_fp_to_fp
_patch_tensor = interpreter._patch_lang_tensor
_call = InterpretedFunction.__call__


def install() -> None:
    """From now on the interpreter computes as a GPU does."""
    Builder.create_dot = _right_dot
    Builder.cast_impl = _right_cast
    Builder.create_fp_to_fp = _right_cast
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    InterpretedFunction.__call__ = _quick_call


@contextmanager
def undone() -> Iterator[None]:
    """The interpreter as it comes."""
    Builder.create_dot, Builder.cast_impl, Builder.create_fp_to_fp = _dot, _cast, _convert
    interpreter._patch_lang_tensor = _patch_tensor
    InterpretedFunction.__call__ = _call
    try:
        yield
    finally:
        install()


def _right_cast(self: Any, x: Any, to: Any, *rounding: Any) -> Any:
    converted = _converted(x, to)
    if converted is None:
        converted = (_convert if rounding else _cast)(self, x, to, *rounding)
    return converted


def _converted(x: Any, to: Any) -> Any:
    """`x` in the type `to`, by torch; None if it is not among the pairs that need it."""
    source, target = x.dtype.scalar, to.scalar
    odd = {tl.bfloat16, tl.float8e4nv} & {source, target}
    if source == target or not odd or not {source, target} <= set(_TYPES):
        return None
    numbers = _numbers(x.data, source)
    if target == tl.float8e4nv:
        numbers = numbers.float().clamp(-448, 448)
    dtype, stored = _TYPES[target]
    answer = numbers.to(dtype).view(torch.uint8).numpy().view(stored)
    return TensorHandle(answer.reshape(x.data.shape), target)


def _numbers(data: NDArray[Any], dtype: Any) -> torch.Tensor:
    """At least one-dimensional."""
    flat = np.ascontiguousarray(data).reshape(-1)
    return torch.from_numpy(flat.view(np.uint8).copy()).view(_TYPES[dtype][0])


def _right_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        a, b = (_converted(x, tl.float32) for x in (a, b))
    return _dot(self, a, b, *rest)


def _quick_call(self: Any, *args: Any, **named: Any) -> Any:
    is_ours = not self.fn.__module__.startswith("triton.")
    return self.rewrite()(*args, **named) if is_ours else _call(self, *args, **named)


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
