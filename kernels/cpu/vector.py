"""Words that numba lacks: raw memory, bfloat16, and rows of 16 floats.

Addresses are plain integers (numba `intp`), in bytes. A `Vector` is LLVM's `<16 x float>`: one
AVX-512 register, two of AVX2, four of NEON.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from kernels.cpu.arguments import WIDTH

OPTIONS: Final[dict[str, Any]] = {
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": {"nsz"},
}
"""How our numba functions are compiled."""

FLAGS: Final = ("nsz",)
"""No reordering and no fusing but our own: equal rows must give equal bits in any batch."""

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32X16 = ir.VectorType(F32, WIDTH)


def machine_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper of a body; it becomes part of the body's code."""
    compiled: Callable[..., Any] = njit(**OPTIONS)(function)
    return compiled


def word(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types that returns a signature and a generator of LLVM IR: a new word."""
    made: Callable[..., Any] = intrinsic(function)
    return made


class VectorType(types.Type):
    """16 floats."""


Vector: Final[Any] = VectorType("Vector")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, F32X16)  # type: ignore[no-untyped-call]


def pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    """An address as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: ir.Type, align: int) -> Any:
    """What lies at an address."""
    return builder.load(pointer(builder, address, kind), align=align)


def broadcast(builder: Any, scalar: Any) -> Any:
    """A vector of 16 times one number."""
    first = builder.insert_element(ir.Constant(F32X16, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(first, ir.Constant(F32X16, ir.Undefined), mask)


def _widen(builder: Any, bits: Any) -> Any:
    """bfloat16 bits (a scalar or a vector) as float32."""
    wide: ir.Type = I32
    narrow: ir.Type = F32
    shift: Any = ir.Constant(I32, 16)
    if isinstance(bits.type, ir.VectorType):
        wide, narrow = ir.VectorType(I32, WIDTH), F32X16
        shift = ir.Constant(wide, [16] * WIDTH)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shift), narrow)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def multiply_add(builder: Any, left: Any, right: Any, total: Any, is_bf16: bool) -> Any:
    """total + left * right, each of 16 floats; or of 16 pairs of bfloat16 in 16 floats' bits."""
    if not is_bf16:
        return call(builder, "fma", left, right, total)
    pairs = ir.VectorType(_BFloat(), 2 * WIDTH)
    signature = ir.FunctionType(F32X16, [F32X16, pairs, pairs])
    tools: Any = cgutils
    dot = tools.get_or_insert_function(
        builder.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    operands = (total, builder.bitcast(left, pairs), builder.bitcast(right, pairs))
    return builder.call(dot, operands)


def round_to_bf16(builder: Any, value: Any) -> Any:
    """bfloat16 bits of a scalar or a vector, rounded to nearest even; NaN stays NaN."""
    is_row = isinstance(value.type, ir.VectorType)
    wide = ir.VectorType(I32, WIDTH) if is_row else I32
    narrow = ir.VectorType(I16, WIDTH) if is_row else I16

    def constant(number: int) -> Any:
        return ir.Constant(wide, [number] * WIDTH if is_row else number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, constant(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, constant(16)), narrow)


def load_vector(builder: Any, address: Any, is_bf16: bool) -> Any:
    """A vector of 16 numbers at an address, as float32."""
    if is_bf16:
        return _widen(builder, load(builder, address, ir.VectorType(I16, WIDTH), 2))
    return load(builder, address, F32X16, 4)


def call(builder: Any, name: str, *operands: Any) -> Any:
    """An LLVM intrinsic over values of one type."""
    kind = operands[0].type
    suffix = "v16f32" if isinstance(kind, ir.VectorType) else "f32"
    callee = ir.FunctionType(kind, [kind] * len(operands))
    tools: Any = cgutils
    function = tools.get_or_insert_function(builder.module, callee, f"llvm.{name}.{suffix}")
    return builder.call(function, operands, fastmath=FLAGS)


@word
def load_i64(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load(builder, arguments[0], I64, 8)

    return types.int64(types.intp), generate


@word
def load_i32(typing: Any, address: Any) -> Any:
    """The int32 at an address, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(load(builder, arguments[0], I32, 4), I64)

    return types.int64(types.intp), generate


@word
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    """Write an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], I64), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@word
def load_f32(typing: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load(builder, arguments[0], F32, 4)

    return types.float32(types.intp), generate


@word
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], F32), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@word
def load_bf16(typing: Any, address: Any) -> Any:
    """The bfloat16 at an address, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widen(builder, load(builder, arguments[0], I16, 2))

    return types.float32(types.intp), generate


@word
def store_bf16(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32 as bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = round_to_bf16(builder, arguments[1])
        builder.store(half, pointer(builder, arguments[0], I16), align=2)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@word
def load_row_bf16(typing: Any, address: Any) -> Any:
    """16 bfloat16 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load_vector(builder, arguments[0], is_bf16=True)

    return Vector(types.intp), generate


@word
def store_row_bf16(typing: Any, address: Any, row: Any) -> Any:
    """Write 16 numbers as bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = round_to_bf16(builder, arguments[1])
        builder.store(half, pointer(builder, arguments[0], half.type), align=2)
        return context.get_dummy_value()

    return types.void(types.intp, Vector), generate


@word
def splat(typing: Any, scalar: Any) -> Any:
    """16 times the same number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return broadcast(builder, arguments[0])

    return Vector(types.float32), generate


@word
def load_row(typing: Any, address: Any) -> Any:
    """16 float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load_vector(builder, arguments[0], is_bf16=False)

    return Vector(types.intp), generate


@word
def store_row(typing: Any, address: Any, row: Any) -> Any:
    """Write 16 float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], F32X16), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, Vector), generate


def _binary(operation: str) -> Any:
    @word
    def apply(typing: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments, flags=FLAGS)

        return Vector(Vector, Vector), generate

    return apply


add: Final = _binary("fadd")
subtract: Final = _binary("fsub")
multiply: Final = _binary("fmul")
divide: Final = _binary("fdiv")


@word
def fma(typing: Any, left: Any, right: Any, total: Any) -> Any:
    """left * right + total, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "fma", *arguments)

    return Vector(Vector, Vector, Vector), generate


@word
def larger(typing: Any, left: Any, right: Any) -> Any:
    """The larger of each pair; a NaN loses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "maxnum", *arguments)

    return Vector(Vector, Vector), generate


def _reduction(operation: Any) -> Any:
    @word
    def reduce(typing: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row = arguments[0]
            for half in (8, 4, 2, 1):
                lanes = [(i + half) % WIDTH for i in range(WIDTH)]
                mask = ir.Constant(ir.VectorType(I32, WIDTH), lanes)
                row = operation(builder, row, builder.shuffle_vector(row, row, mask))
            return builder.extract_element(row, ir.Constant(I32, 0))

        return types.float32(Vector), generate

    return reduce


sum_of: Final = _reduction(lambda builder, a, b: builder.fadd(a, b, flags=FLAGS))
largest_of: Final = _reduction(lambda builder, a, b: call(builder, "maxnum", a, b))


@word
def first_of(typing: Any, row: Any) -> Any:
    """The first number of a row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], ir.Constant(I32, 0))

    return types.float32(Vector), generate


_EXP_TERMS: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                     1.6666665459e-1, 5.0000001201e-1)  # fmt: skip


@word
def exp(typing: Any, row: Any) -> Any:
    """e to the power of each number, for numbers up to 0 or so; within 2e-7 of the true value.

    pip's LLVM has no vector math library: `np.exp` would be 16 calls. Source: the polynomial of
    the Cephes library's `expf`, after taking out a power of two.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def constant(value: float) -> Any:
            return ir.Constant(F32X16, [value] * WIDTH)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return call(builder, "fma", a, b, c)

        x = arguments[0]
        low = builder.fcmp_ordered("olt", x, constant(-87.0))  # false for NaN, which stays
        x = builder.select(low, constant(-87.0), x)
        power = call(builder, "rint", builder.fmul(x, constant(1.44269504), flags=FLAGS))
        rest = fma(power, constant(-0.693359375), x)
        rest = fma(power, constant(2.12194440e-4), rest)
        series = constant(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            series = fma(series, rest, constant(term))
        square = builder.fmul(rest, rest, flags=FLAGS)
        series = fma(series, square, builder.fadd(rest, constant(1.0), flags=FLAGS))
        wide = ir.VectorType(I32, WIDTH)
        exponent = builder.add(builder.fptosi(power, wide), ir.Constant(wide, [127] * WIDTH))
        scale = builder.shl(exponent, ir.Constant(wide, [23] * WIDTH))
        return builder.fmul(series, builder.bitcast(scale, F32X16), flags=FLAGS)

    return Vector(Vector), generate
