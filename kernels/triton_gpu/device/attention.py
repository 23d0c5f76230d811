"""Paged attention on the GPU: one body for decode and for prefill, and the fold of split sequences.

What each program does is a row of a work list, made by `kernels/triton_gpu/work.py`, which names
the columns. A program's tile has BLOCK_M rows, num_tokens queries times the GROUP heads that share
a key-value head, and goes over its keys BLOCK_N at a time, counted from the sequence's start.

A row's sum is the same whatever other rows are in its tile, and masked keys add exact zeros. So an
answer depends on its sequence alone, bit by bit.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.device.e4m3 import decode

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(rows, dims, is_key, HEAD_DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK_N, PAD] of keys or values at the pointers `rows`; zeros where there is nothing."""
    places = rows[:, None] + dims[None, :]
    if HEAD_DIM != PAD:
        is_number = dims[None, :] < HEAD_DIM
        if MASKED:
            loaded = tl.load(places, mask=is_key[:, None] & is_number, other=0.0)
        else:
            loaded = tl.load(places, mask=is_number, other=0.0)
    else:
        loaded = tl.load(places, mask=is_key[:, None], other=0.0) if MASKED else tl.load(places)
    return loaded


@triton.jit
def _operand(stored, dtype: tl.constexpr):
    """What the pool stores, as the matrix product takes it."""
    return decode(stored) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def _tile(
    acc, peak, mass, queries, start, keys_to, positions, slopes, keys, values, table,
    stride_block, stride_token, scale, soft_cap, in_tile, dims,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold BLOCK_N keys from `start` into the running sums; scores are in powers of 2."""
    places = start + in_tile
    is_key = places < keys_to
    if MASKED:
        blocks = tl.load(table + places // BLOCK_SIZE, mask=is_key, other=0)
    else:
        blocks = tl.load(table + places // BLOCK_SIZE)
    offsets = blocks.to(tl.int64) * stride_block + (places % BLOCK_SIZE) * stride_token
    key = _load(keys + offsets, dims, is_key, HEAD_DIM, HEAD_PAD, MASKED)
    value = _load(values + offsets, dims, is_key, HEAD_DIM, HEAD_PAD, MASKED)
    key = tl.trans(_operand(key, queries.dtype))
    value = _operand(value, queries.dtype)
    score = tl.dot(queries, key, input_precision="ieee")
    if SOFT_CAP:  # tanh(t) = 1 - 2 / (1 + exp(2 t)), which overflows to the right limits
        capped = 1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 * scale / soft_cap)))
        score = capped * (soft_cap * LOG2E)
    else:
        score = score * (scale * LOG2E)
    if ALIBI:
        distance = places[None, :] - positions[:, None]
        score += (slopes[:, None] * LOG2E) * distance.to(tl.float32)
    if MASKED:
        is_seen = (places[None, :] <= positions[:, None]) & is_key[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (places[None, :] > positions[:, None] - WINDOW)
        score = tl.where(is_seen, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    base = new_peak
    if MASKED:
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet
    weights = tl.exp2(score - base[:, None])
    decay = tl.exp2(peak - base)
    mass = mass * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(queries.dtype), value, acc, input_precision="ieee")
    return acc, new_peak, mass


@triton.jit
def attention_kernel(
    out, partial_out, partial_log, q, k, v, tables, work, alibi,
    scale, value_scale, soft_cap,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_block, stride_head, stride_token, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid = (items of work, key-value heads). Partials are written where `work` says so."""
    item = work + tl.program_id(0).to(tl.int64) * 8
    num_tokens = tl.load(item + 2)
    if num_tokens == 0:  # padding, for graphs of a fixed size
        return
    sequence = tl.load(item).to(tl.int64)
    first_token = tl.load(item + 1).to(tl.int64)
    first_position = tl.load(item + 3)
    keys_from = tl.load(item + 4)
    keys_to = tl.load(item + 5)
    partial = tl.load(item + 6).to(tl.int64)
    plain_to = tl.load(item + 7)
    kv_head = tl.program_id(1).to(tl.int64)

    in_tile = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_PAD)
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = token < num_tokens
    is_number = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    places = (first_token + token)[:, None] * stride_q_token + head[:, None] * stride_q_head
    queries = tl.load(q + places + dims[None, :], mask=is_number, other=0.0)
    if k.dtype.element_ty.primitive_bitwidth == 8:  # float16 holds each of its numbers
        queries = queries.to(tl.float16)
        if k.dtype.element_ty == tl.uint8:  # `decode` leaves 1/256 in keys and values
            scale = scale * 256.0
            value_scale = value_scale * 256.0
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi + head, mask=is_row, other=0.0)
    keys = k + kv_head * stride_head
    values = v + kv_head * stride_head
    table = tables + sequence * stride_table
    positions = first_position + token

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    for start in tl.range(keys_from, plain_to, BLOCK_N, num_stages=STAGES):
        acc, peak, mass = _tile(
            acc, peak, mass, queries, start, keys_to, positions, slopes, keys, values, table,
            stride_block, stride_token, scale, soft_cap, in_tile, dims,
            BLOCK_SIZE, HEAD_DIM, HEAD_PAD, WINDOW, ALIBI, SOFT_CAP, False,
        )  # fmt: skip
    for start in tl.range(plain_to, keys_to, BLOCK_N, num_stages=STAGES):
        acc, peak, mass = _tile(
            acc, peak, mass, queries, start, keys_to, positions, slopes, keys, values, table,
            stride_block, stride_token, scale, soft_cap, in_tile, dims,
            BLOCK_SIZE, HEAD_DIM, HEAD_PAD, WINDOW, ALIBI, SOFT_CAP, True,
        )  # fmt: skip

    mass = tl.where(mass == 0.0, 1.0, mass)
    acc = acc * (value_scale / mass)[:, None]
    is_whole = True
    if SPLIT:
        is_whole = partial < 0
        if not is_whole:
            row = partial * NUM_HEADS + head
            tl.store(partial_out + row[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_number)
            tl.store(partial_log + row, peak + tl.log2(mass), mask=is_row)
    if is_whole:
        places = (first_token + token)[:, None] * stride_out_token + head[:, None] * stride_out_head
        answer = acc.to(out.dtype.element_ty)
        tl.store(out + places + dims[None, :], answer, mask=is_number)


@triton.jit
def fold_kernel(
    out, partial_out, partial_log, folds, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Put the splits of a sequence together. grid = (folds, heads).

    A fold is (token, first partial, number of partials, unused); none: padding, for graphs.
    """
    fold = folds + tl.program_id(0).to(tl.int64) * 4
    count = tl.load(fold + 2)
    if count == 0:
        return
    token = tl.load(fold).to(tl.int64)
    first = tl.load(fold + 1).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, HEAD_PAD)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, count, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        is_split = split < count
        row = (first + split) * NUM_HEADS + head
        log = tl.load(partial_log + row, mask=is_split, other=float("-inf"))
        part = tl.load(
            partial_out + row[:, None] * HEAD_DIM + dims[None, :],
            mask=is_split[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(log, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(log - base)
        decay = tl.exp2(peak - base)
        mass = mass * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        peak = new_peak
    acc = acc / tl.where(mass == 0.0, 1.0, mass)
    place = out + token * stride_out_token + head * stride_out_head
    tl.store(place + dims, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
