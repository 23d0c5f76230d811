"""The small steps between products: norm, gated activation, rotary positions with cache writes.

Each body takes rows, RUN at a time, from a shared counter until none is left. Sums are float32.
"""

import math
from typing import Any

import numpy as np

from kernels.cpu import vector
from kernels.cpu.arguments import (
    ACTIVATED,
    COUNT,
    DELTA,
    EPS,
    GATE_UP,
    HALF,
    NEXT,
    NORMED,
    QKV,
    R_BLOCK_BYTES,
    R_BLOCK_SIZE,
    R_HEAD_BYTES,
    R_HEAD_DIM,
    R_HEADS,
    R_KV_HEADS,
    R_POOL,
    R_QUERIES,
    R_SLOTS,
    RESIDUAL,
    ROTARY,
    RUN,
    SIZE,
    WEIGHT,
    WIDTH,
)
from kernels.cpu.synchronise import fetch_add
from kernels.cpu.vector import (
    add,
    divide,
    exp,
    first_of,
    larger,
    load_f32,
    load_i64,
    load_row,
    machine_code,
    multiply,
    splat,
    store_f32,
    store_row,
    subtract,
    sum_of,
)

FLOAT = np.float32
LOWEST_GATE = -80.0  # below it silu is 0 in float32; exp of its negative still fits


def make_norm(is_bf16: bool) -> Any:
    """residual += delta; out = residual / sqrt(mean(residual^2) + eps) * weight."""
    size = 2 if is_bf16 else 4
    load = vector.load_bf16 if is_bf16 else load_f32
    store = vector.store_bf16 if is_bf16 else store_f32
    load_wide = vector.load_row_bf16 if is_bf16 else load_row
    store_wide = vector.store_row_bf16 if is_bf16 else store_row

    @machine_code
    def norm_row(residual: int, delta: int, weight: int, out: int, length: int, eps: float) -> None:
        whole = length // WIDTH * WIDTH
        squares = splat(FLOAT(0.0))
        for i in range(0, whole, WIDTH):
            x = load_row(residual + 4 * i)
            if delta != 0:
                x = add(x, load_wide(delta + size * i))
                store_row(residual + 4 * i, x)
            squares = add(squares, multiply(x, x))
        total = sum_of(squares)
        for i in range(whole, length):
            y = load_f32(residual + 4 * i)
            if delta != 0:
                y += load(delta + size * i)
                store_f32(residual + 4 * i, y)
            total += y * y
        factor = FLOAT(1.0) / FLOAT(math.sqrt(total / FLOAT(length) + eps))
        factors = splat(factor)
        for i in range(0, whole, WIDTH):
            x = multiply(multiply(load_row(residual + 4 * i), factors), load_row(weight + 4 * i))
            store_wide(out + size * i, x)
        for i in range(whole, length):
            y = load_f32(residual + 4 * i) * factor * load_f32(weight + 4 * i)
            store(out + size * i, y)

    def norm(arguments: int) -> None:
        length = load_i64(arguments + 8 * SIZE)
        count = load_i64(arguments + 8 * COUNT)
        run = load_i64(arguments + 8 * RUN)
        delta = load_i64(arguments + 8 * DELTA)
        while True:
            first = fetch_add(arguments + 8 * NEXT, run)
            if first >= count:
                break
            for row in range(first, min(count, first + run)):
                norm_row(
                    load_i64(arguments + 8 * RESIDUAL) + 4 * length * row,
                    delta + size * length * row if delta != 0 else 0,
                    load_i64(arguments + 8 * WEIGHT),
                    load_i64(arguments + 8 * NORMED) + size * length * row,
                    length,
                    load_f32(arguments + 8 * EPS),
                )

    return norm


def make_silu(is_bf16: bool) -> Any:
    """out = silu(gate) * up, where each row holds all gates, then all ups."""
    size = 2 if is_bf16 else 4
    load = vector.load_bf16 if is_bf16 else load_f32
    store = vector.store_bf16 if is_bf16 else store_f32
    load_wide = vector.load_row_bf16 if is_bf16 else load_row
    store_wide = vector.store_row_bf16 if is_bf16 else store_row

    @machine_code
    def activated(gate: Any, up: Any) -> Any:
        one = splat(FLOAT(1.0))
        inverse = exp(subtract(splat(FLOAT(0.0)), larger(gate, splat(FLOAT(LOWEST_GATE)))))
        return multiply(divide(gate, add(one, inverse)), up)

    def silu(arguments: int) -> None:
        half = load_i64(arguments + 8 * HALF)
        count = load_i64(arguments + 8 * COUNT)
        run = load_i64(arguments + 8 * RUN)
        whole = half // WIDTH * WIDTH
        while True:
            first = fetch_add(arguments + 8 * NEXT, run)
            if first >= count:
                break
            for row in range(first, min(count, first + run)):
                gates = load_i64(arguments + 8 * GATE_UP) + size * 2 * half * row
                ups = gates + size * half
                out = load_i64(arguments + 8 * ACTIVATED) + size * half * row
                for i in range(0, whole, WIDTH):
                    y = activated(load_wide(gates + size * i), load_wide(ups + size * i))
                    store_wide(out + size * i, y)
                for i in range(whole, half):
                    gate = splat(FLOAT(load(gates + size * i)))
                    up = splat(FLOAT(load(ups + size * i)))
                    store(out + size * i, first_of(activated(gate, up)))

    return silu


def make_rotate(is_bf16: bool) -> Any:
    """Turn queries and keys by their positions; store keys (token-minor) and values in the pool."""
    size = 2 if is_bf16 else 4
    load = vector.load_bf16 if is_bf16 else load_f32
    store = vector.store_bf16 if is_bf16 else store_f32

    @machine_code
    def turn(source: int, target: int, step: int, rotary: int, half: int) -> None:
        """Rotate one head; `step` bytes lie between the numbers of `target`."""
        for i in range(half):
            a = load(source + size * i)
            b = load(source + size * (i + half))
            cosine = load_f32(rotary + 4 * i)
            sine = load_f32(rotary + 4 * (i + half))
            store(target + step * i, a * cosine - b * sine)
            store(target + step * (i + half), b * cosine + a * sine)

    @machine_code
    def rotate_token(arguments: int, token: int) -> None:
        heads = load_i64(arguments + 8 * R_HEADS)
        kv_heads = load_i64(arguments + 8 * R_KV_HEADS)
        head_dim = load_i64(arguments + 8 * R_HEAD_DIM)
        block_size = load_i64(arguments + 8 * R_BLOCK_SIZE)
        head_bytes = size * head_dim
        source = load_i64(arguments + 8 * QKV) + head_bytes * (heads + 2 * kv_heads) * token
        rotary = load_i64(arguments + 8 * ROTARY) + 4 * head_dim * token
        queries = load_i64(arguments + 8 * R_QUERIES) + head_bytes * heads * token
        for head in range(heads):
            turn(
                source + head_bytes * head, queries + head_bytes * head, size, rotary, head_dim // 2
            )
        slot = load_i64(load_i64(arguments + 8 * R_SLOTS) + 8 * token)
        block = load_i64(arguments + 8 * R_POOL)
        block += slot // block_size * load_i64(arguments + 8 * R_BLOCK_BYTES)
        offset = slot % block_size
        for head in range(kv_heads):
            keys = block + load_i64(arguments + 8 * R_HEAD_BYTES) * head
            turn(
                source + head_bytes * (heads + head),
                keys + size * offset,
                size * block_size,
                rotary,
                head_dim // 2,
            )
            values = source + head_bytes * (heads + kv_heads + head)
            target = keys + head_bytes * (block_size + offset)
            for i in range(head_dim):
                store(target + size * i, load(values + size * i))

    def rotate(arguments: int) -> None:
        count = load_i64(arguments + 8 * COUNT)
        run = load_i64(arguments + 8 * RUN)
        while True:
            first = fetch_add(arguments + 8 * NEXT, run)
            if first >= count:
                break
            for token in range(first, min(count, first + run)):
                rotate_token(arguments, token)

    return rotate
