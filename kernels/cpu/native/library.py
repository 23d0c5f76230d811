"""The native library's structs and functions, as ctypes sees them; their meaning is in the headers.

Pointers are addresses. Who builds a struct keeps the tensors behind it alive.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import ClassVar, Final

from kernels.cpu.native.build import NotBuilt, library

DONE, NO_MEMORY = 0, 1


class Matrix(Structure):
    """Weights in tiles."""

    _fields_: ClassVar = [
        ("tiles", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64),
        ("scales", c_void_p),
    ]  # fmt: skip


class Pool(Structure):
    """Where a pool's tiles lie, and what they hold; strides in elements."""

    _fields_: ClassVar = [
        ("memory", c_void_p), ("block_stride", c_int64), ("layer_stride", c_int64),
        ("head_stride", c_int64), ("block_size", c_int64), ("numbers", c_int64),
    ]  # fmt: skip


class Batch(Structure):
    """A `PackedBatch`."""

    _fields_: ClassVar = [
        ("token_ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p),
        ("row_starts", c_void_p), ("context_lengths", c_void_p), ("tables", c_void_p),
        ("table_stride", c_int64), ("num_rows", c_int64), ("num_tokens", c_int64),
        ("logit_tokens", c_void_p), ("num_logits", c_int64),
    ]  # fmt: skip


class Layer(Structure):
    """One decoder layer."""

    _fields_: ClassVar = [
        ("input_norm", c_void_p), ("post_norm", c_void_p),
        ("qkv", Matrix), ("output", Matrix), ("gate_up", Matrix), ("down", Matrix),
        ("window", c_int64),
    ]  # fmt: skip


class Decoder(Structure):
    """A whole model."""

    _fields_: ClassVar = [
        ("is_bf16", c_int64), ("num_layers", c_int64), ("hidden_size", c_int64),
        ("intermediate_size", c_int64), ("vocab_size", c_int64), ("heads", c_int64),
        ("kv_heads", c_int64), ("head_dim", c_int64), ("eps", c_double), ("scale", c_double),
        ("layers", POINTER(Layer)), ("final_norm", c_void_p), ("frequencies", c_void_p),
        ("embedding", Matrix), ("head", Matrix),
    ]  # fmt: skip


class Ids(Structure):
    """A list of int32."""

    _fields_: ClassVar = [("at", c_void_p), ("count", c_int64)]


class Adjustment(Structure):
    """What is done to a row of logits before a token is drawn from it."""

    _fields_: ClassVar = [
        ("biased", Ids), ("prompt", Ids), ("answer", Ids), ("allowed", Ids), ("excluded", Ids),
        ("biases", c_void_p), ("frequency", c_double), ("presence", c_double),
        ("repetition", c_double),
    ]  # fmt: skip


class Draw(Structure):
    """One token to draw."""

    _fields_: ClassVar = [
        ("logits", c_void_p), ("adjustment", c_void_p), ("die", c_double), ("top_p", c_double),
        ("top_k", c_int64), ("temperature", c_float), ("min_p", c_float),
    ]  # fmt: skip


class Ask(Structure):
    """What is asked of a row of logits, and the answer."""

    _fields_: ClassVar = [
        ("logits", c_void_p), ("token", c_int64), ("num_top", c_int64), ("top", c_void_p),
        ("total", c_int64), ("rank", c_int64), ("peak", c_double),
    ]  # fmt: skip


_SIZES: Final = sum(
    ctypes.sizeof(kind) * factor
    for kind, factor in (
        (Matrix, 1), (Pool, 100), (Batch, 10_000), (Layer, 1_000_000), (Decoder, 100_000_000),
        (Draw, 10**10), (Adjustment, 10**13), (Ask, 10**16),
    )
)  # fmt: skip

_FUNCTIONS: Final[dict[str, tuple[object, list[object]]]] = {
    "splitflap_abi": (c_int64, []),
    "splitflap_lanes": (c_int, []),
    "splitflap_has_matrices": (c_int, []),
    "splitflap_packed_size": (c_int64, [c_int64] * 3),
    "splitflap_pack": (None, [c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "splitflap_int8_size": (c_int64, [c_int64] * 2),
    "splitflap_int8_scales": (c_int64, [c_int64]),
    "splitflap_pack_int8": (
        c_int, [c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    ),
    "splitflap_step": (
        c_int, [POINTER(Decoder), POINTER(Pool), POINTER(Batch), c_void_p, c_int],
    ),
    "splitflap_multiply": (
        c_int, [c_int64, POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64, c_int],
    ),
    "splitflap_rows": (None, [c_int64, POINTER(Matrix), c_void_p, c_int64, c_void_p]),
    "splitflap_attend": (
        c_int,
        [c_int64, POINTER(Pool), c_int64, POINTER(Batch), c_int64, c_int64, c_int64, c_double,
         c_int64, c_void_p, c_void_p, c_int],
    ),
    "splitflap_copy": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int]),
    "splitflap_draw": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_int]),
    "splitflap_tell": (c_int, [c_void_p, c_int64, c_int64, c_int]),
    "splitflap_write": (
        None,
        [c_int64, POINTER(Pool), c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64,
         c_int],
    ),
}  # fmt: skip


def load(path: str) -> ctypes.CDLL:
    """A library's functions, typed. Raises: NotBuilt if it is not this version's."""
    try:
        found = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"{path} cannot be loaded: {error}") from error
    if found.splitflap_abi() != _SIZES:
        raise NotBuilt(f"{path} has structs of other sizes")
    return found


@cache
def native() -> ctypes.CDLL:
    """This CPU's library. Raises: NotBuilt with the reason."""
    return load(str(library()))


def raise_if_failed(outcome: int, num_rows: int) -> None:
    """Raises: MemoryError if a function of the library had not enough for `num_rows`."""
    if outcome != DONE:
        raise MemoryError(f"no memory to work in for {num_rows} rows")
