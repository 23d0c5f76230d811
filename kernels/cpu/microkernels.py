"""The innermost loops, in LLVM IR because they must live in registers.

All multiply `rows` rows by a tile whose numbers lie 16 to a vector. A maker's result, for so many
rows, is a word for numba functions. A row's sums are added in an order that does not depend on
`rows`: whoever shares a batch, every row's result is the same, bit by bit.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.arguments import WIDTH
from kernels.cpu.vector import (
    F32,
    F32X16,
    FLAGS,
    I64,
    broadcast,
    call,
    load,
    load_vector,
    multiply_add,
    pointer,
    round_to_bf16,
    word,
)


def _offset(builder: Any, base: Any, stride: Any, times: int) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(I64, times)))


def _accumulators(builder: Any, count: int, initial: Any) -> list[Any]:
    """Vectors that live through a loop; LLVM keeps them in registers."""
    tools: Any = cgutils
    slots = [tools.alloca_once(builder, F32X16) for _ in range(count)]
    for slot, value in zip(slots, initial, strict=True):
        builder.store(value, slot)
    return slots


def make_score_tile(rows: int, is_bf16: bool) -> Any:
    """`rows` queries times a tile of 16 keys, token-minor.

    The result is an intrinsic of (query address, query stride, key address, key stride, head_dim,
    score address, score stride): strides in bytes, queries and scores float32; head_dim a multiple
    of 8; key number d of all 16 tokens lies at key address + d * key stride.
    """
    steps = 4  # sums at once, to hide a product's latency; 6 rows of them fill the registers

    @word
    def score_tile(
        typing: Any, q: Any, q_stride: Any, k: Any, k_stride: Any, size: Any, s: Any, s_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, q_stride, k, k_stride, size, s, s_stride = arguments
            zero = ir.Constant(F32X16, [0.0] * WIDTH)
            sums = _accumulators(builder, rows * steps, [zero] * (rows * steps))
            count = builder.sdiv(size, ir.Constant(I64, steps))
            with cgutils.for_range(builder, count) as loop:
                first = builder.mul(loop.index, ir.Constant(I64, steps))
                k_first = builder.add(k, builder.mul(first, k_stride))
                q_first = builder.add(q, builder.mul(first, ir.Constant(I64, 4)))
                for step in range(steps):
                    keys = load_vector(builder, _offset(builder, k_first, k_stride, step), is_bf16)
                    for row in range(rows):
                        address = _offset(builder, q_first, q_stride, row)
                        address = builder.add(address, ir.Constant(I64, 4 * step))
                        query = broadcast(builder, load(builder, address, F32, 4))
                        slot = sums[row * steps + step]
                        total = call(builder, "fma", query, keys, builder.load(slot))
                        builder.store(total, slot)
            for row in range(rows):
                total = builder.load(sums[row * steps])
                for step in range(1, steps):
                    more = builder.load(sums[row * steps + step])
                    total = builder.fadd(total, more, flags=FLAGS)
                target = pointer(builder, _offset(builder, s, s_stride, row), F32X16)
                builder.store(total, target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return score_tile


def make_add_values(rows: int, columns: int, is_bf16: bool) -> Any:
    """Add weights times values to `rows` accumulators, 16 * `columns` numbers of each.

    The result is an intrinsic of (weight address, weight stride, value address, value stride,
    number of tokens, accumulator address, accumulator stride): strides in bytes, weights and
    accumulators float32.
    """

    @word
    def add_values(
        typing: Any, p: Any, p_stride: Any, v: Any, v_stride: Any, count: Any, a: Any, a_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p, p_stride, v, v_stride, count, a, a_stride = arguments
            width = WIDTH * (2 if is_bf16 else 4)
            places = [
                builder.add(
                    _offset(builder, a, a_stride, row), ir.Constant(I64, column * WIDTH * 4)
                )
                for row in range(rows)
                for column in range(columns)
            ]
            loaded = [load(builder, place, F32X16, 4) for place in places]
            sums = _accumulators(builder, rows * columns, loaded)
            with cgutils.for_range(builder, count) as loop:
                v_row = builder.add(v, builder.mul(loop.index, v_stride))
                p_first = builder.add(p, builder.mul(loop.index, ir.Constant(I64, 4)))
                values = [
                    load_vector(
                        builder, builder.add(v_row, ir.Constant(I64, column * width)), is_bf16
                    )
                    for column in range(columns)
                ]
                for row in range(rows):
                    address = _offset(builder, p_first, p_stride, row)
                    weight = broadcast(builder, load(builder, address, F32, 4))
                    for column in range(columns):
                        slot = sums[row * columns + column]
                        total = call(builder, "fma", weight, values[column], builder.load(slot))
                        builder.store(total, slot)
            for place, slot in zip(places, sums, strict=True):
                builder.store(builder.load(slot), pointer(builder, place, F32X16), align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return add_values


def make_product(rows: int, tiles: int, is_bf16: bool, gives_f32: bool) -> Any:
    """`rows` inputs times `tiles` tiles of 16 outputs, plus biases.

    A tile is `[steps][16]` float32, or `[steps][16][2]` bfloat16: two inputs' weights together, as
    AVX512_BF16's dot product takes them. The result is a word of (input address, input stride, tile
    address, tile bytes, steps, output address, output stride, bias address): strides in bytes,
    biases float32, outputs float32 or the inputs' dtype.
    """

    @word
    def product(
        typing: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        tile: Any,
        steps: Any,
        y: Any,
        y_stride: Any,
        b: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, w, tile, steps, y, y_stride, b = arguments
            biases = [
                load(builder, builder.add(b, ir.Constant(I64, 4 * WIDTH * i)), F32X16, 4)
                for i in range(tiles)
            ]
            sums = _accumulators(builder, rows * tiles, biases * rows)
            with cgutils.for_range(builder, steps) as loop:
                w_step = builder.add(w, builder.mul(loop.index, ir.Constant(I64, 4 * WIDTH)))
                x_step = builder.add(x, builder.mul(loop.index, ir.Constant(I64, 4)))
                weights = [
                    load(builder, _offset(builder, w_step, tile, i), F32X16, 4)
                    for i in range(tiles)
                ]
                for row in range(rows):
                    given = load(builder, _offset(builder, x_step, x_stride, row), F32, 2)
                    inputs = broadcast(builder, given)
                    for i in range(tiles):
                        slot = sums[row * tiles + i]
                        total = multiply_add(
                            builder, inputs, weights[i], builder.load(slot), is_bf16
                        )
                        builder.store(total, slot)
            for row in range(rows):
                target = _offset(builder, y, y_stride, row)
                for i in range(tiles):
                    total = builder.load(sums[row * tiles + i])
                    if is_bf16 and not gives_f32:
                        total = round_to_bf16(builder, total)
                    width = WIDTH * (2 if is_bf16 and not gives_f32 else 4)
                    place = builder.add(target, ir.Constant(I64, width * i))
                    builder.store(total, pointer(builder, place, total.type), align=2)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return product
