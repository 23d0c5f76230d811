"""What is put into blocks, and blocks moved whole."""

import triton
import triton.language as tl

from kernels.triton_gpu.device.e4m3 import encode


@triton.jit
def _stored(x, inverse_scale, dtype: tl.constexpr):
    """A key or value as the pool keeps it; 8 bits are e4m3, as bits (uint8) or by hardware."""
    if dtype == tl.uint8:
        stored = encode(x.to(tl.float32) * inverse_scale)
    elif dtype.primitive_bitwidth == 8:
        near = x.to(tl.float32) * inverse_scale
        stored = tl.clamp(near, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    else:
        stored = x.to(dtype)
    return stored


@triton.jit
def write_kernel(
    keys, values, k, v, slots, inverse_key_scale, inverse_value_scale,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_block, stride_head, stride_token,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """grid = (tokens, heads / BLOCK_H); a token whose slot is negative is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    mask = (head < KV_HEADS) & (dims < HEAD_DIM)
    key = tl.load(
        keys + token * stride_key_token + head * stride_key_head + dims, mask=mask, other=0.0
    )
    value = tl.load(
        values + token * stride_value_token + head * stride_value_head + dims, mask=mask, other=0.0
    )
    there = place + head * stride_head + dims
    tl.store(k + there, _stored(key, inverse_key_scale, k.dtype.element_ty), mask=mask)
    tl.store(v + there, _stored(value, inverse_value_scale, v.dtype.element_ty), mask=mask)


@triton.jit
def copy_kernel(
    destination, source, pairs, num_words,
    stride_to_block, stride_to_layer, stride_from_block, stride_from_layer,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy blocks as words. grid = (pairs, layers, num_words / CHUNK).

    A pair is (source block, destination block), int64; `num_words` are those of a block in a layer.
    """
    pair = pairs + tl.program_id(0).to(tl.int64) * 2
    layer = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    from_place = tl.load(pair).to(tl.int64) * stride_from_block + layer * stride_from_layer
    to_place = tl.load(pair + 1).to(tl.int64) * stride_to_block + layer * stride_to_layer
    mask = words < num_words
    tl.store(destination + to_place + words, tl.load(source + from_place + words, mask=mask), mask)
