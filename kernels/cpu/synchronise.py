"""Words for threads that work together: atomic memory, a pause, sleep and wake, calls by address.

All atomic words are sequentially consistent.
"""

import platform
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.vector import I64, pointer, word

_ORDER: Final = "seq_cst"
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


@word
def fetch_add(typing: Any, address: Any, step: Any) -> Any:
    """Add to the int64 at an address; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), arguments[1], _ORDER)

    return types.int64(types.intp, types.int64), generate


@word
def fetch_and(typing: Any, address: Any, mask: Any) -> Any:
    """Keep the bits of `mask` in the int64 at an address; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("and", pointer(builder, arguments[0], I64), arguments[1], _ORDER)

    return types.int64(types.intp, types.int64), generate


@word
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", pointer(builder, arguments[0], I64), arguments[1], _ORDER)

    return types.int64(types.intp, types.int64), generate


@word
def swap_if(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write `value` if the int64 at an address is `expected`; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, expected, value = arguments
        place = pointer(builder, address, I64)
        pair = builder.cmpxchg(place, expected, value, _ORDER, _ORDER)
        return builder.zext(builder.extract_value(pair, 1), I64)

    return types.int64(types.intp, types.int64, types.int64), generate


@word
def atomic_load(typing: Any, address: Any) -> Any:
    """The int64 at an address, as other threads have written it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(pointer(builder, arguments[0], I64), _ORDER, 8)

    return types.int64(types.intp), generate


@word
def pause(typing: Any) -> Any:
    """Leave the core's other thread some room while waiting."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tools: Any = cgutils
        nothing = ir.FunctionType(ir.VoidType(), [])
        if platform.machine() == "x86_64":
            builder.call(
                tools.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.void(), generate


@word
def call_body(typing: Any, function: Any, block: Any) -> Any:
    """Run the body at an address with its argument block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(pointer(builder, arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _libc(builder: Any, name: str, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(I64, [value.type for value in arguments])
    tools: Any = cgutils
    return builder.call(tools.get_or_insert_function(builder.module, kind, name), arguments)


@word
def give_way(typing: Any) -> Any:
    """Let another thread have this core, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _libc(builder, "sched_yield", [])
        return context.get_dummy_value()

    return types.void(), generate


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    """Linux's futex(address, operation, value, no timeout); elsewhere only a yield."""
    if _FUTEX is None:
        _libc(builder, "sched_yield", [])
        return
    zero = ir.Constant(I64, 0)
    numbers = [ir.Constant(I64, _FUTEX), address, ir.Constant(I64, operation), value]
    _libc(builder, "syscall", [*numbers, zero, zero, zero])


@word
def sleep_while(typing: Any, address: Any, expected: Any) -> Any:
    """Sleep if the int32 at an address is still `expected`, until woken; may wake early."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _FUTEX_WAIT_PRIVATE, arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@word
def wake_all(typing: Any, address: Any) -> Any:
    """Wake every thread that sleeps on an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _FUTEX_WAKE_PRIVATE, ir.Constant(I64, 2**31 - 1))
        return context.get_dummy_value()

    return types.void(types.intp), generate
