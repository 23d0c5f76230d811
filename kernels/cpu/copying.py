"""Whole blocks from place to place: pieces of them, which threads take in turn."""

from typing import Any

from llvmlite import ir
from numba.core import types

from kernels.cpu.arguments import (
    C_BLOCK_BYTES,
    C_DESTINATION,
    C_PAIRS,
    C_PIECE_BYTES,
    C_PIECES,
    C_SOURCE,
    COPY_VECTOR,
    COUNT,
    NEXT,
    RUN,
)
from kernels.cpu.synchronise import fetch_add
from kernels.cpu.vector import I32, I64, load_i64, machine_code, pointer, word

_VECTOR = ir.VectorType(I64, COPY_VECTOR // 8)


@word
def stream(typing: Any, source: Any, destination: Any) -> Any:
    """COPY_VECTOR bytes, past the cache: nobody reads them before the cache has other things.

    `destination` is a multiple of COPY_VECTOR. Other threads see the bytes after this thread's
    next `fetch_add`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        read = builder.load(pointer(builder, arguments[0], _VECTOR), align=8)
        store = builder.store(read, pointer(builder, arguments[1], _VECTOR), align=COPY_VECTOR)
        once = builder.module.add_metadata([ir.Constant(I32, 1)])
        store.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@word
def copy_bytes(typing: Any, destination: Any, source: Any, count: Any) -> Any:
    """libc's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I64, [I64, I64, I64])
        function = builder.module.globals.get("memcpy")
        if function is None:
            function = ir.Function(builder.module, kind, "memcpy")
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@machine_code
def copy_piece(source: int, destination: int, size: int) -> None:
    """`size` bytes; runs that are aligned go past the cache."""
    streamed = 0
    if (source % 8 | destination % COPY_VECTOR) == 0:
        streamed = size // COPY_VECTOR * COPY_VECTOR
        for i in range(0, streamed, COPY_VECTOR):
            stream(source + i, destination + i)
    if streamed < size:
        copy_bytes(destination + streamed, source + streamed, size - streamed)


def copy(arguments: int) -> None:
    """The body: COUNT pieces, C_PIECES of them a block; see the argument block."""
    count = load_i64(arguments + 8 * COUNT)
    run = load_i64(arguments + 8 * RUN)
    pieces = load_i64(arguments + 8 * C_PIECES)
    piece_bytes = load_i64(arguments + 8 * C_PIECE_BYTES)
    block_bytes = load_i64(arguments + 8 * C_BLOCK_BYTES)
    pairs = load_i64(arguments + 8 * C_PAIRS)
    while True:
        first = fetch_add(arguments + 8 * NEXT, run)
        if first >= count:
            break
        for item in range(first, min(count, first + run)):
            pair = pairs + 16 * (item // pieces)
            start = item % pieces * piece_bytes
            copy_piece(
                load_i64(arguments + 8 * C_SOURCE) + load_i64(pair) * block_bytes + start,
                load_i64(arguments + 8 * C_DESTINATION) + load_i64(pair + 8) * block_bytes + start,
                min(piece_bytes, block_bytes - start),
            )
