"""Matrices in tiles: products with them, whose tiles threads take in turn, and their rows."""

from collections.abc import Callable
from typing import Any

from kernels.cpu.arguments import (
    COUNT,
    E_IDS,
    E_OUT,
    E_STEPS,
    E_TILES,
    NEXT,
    P_BIAS,
    P_INPUT,
    P_INPUT_STRIDE,
    P_OUTPUT,
    P_OUTPUT_STRIDE,
    P_ROWS,
    P_STEPS,
    P_TILES,
    PRODUCT_ROWS,
    PRODUCT_TILES,
    RUN,
    WIDTH,
)
from kernels.cpu.microkernels import make_product
from kernels.cpu.synchronise import fetch_add
from kernels.cpu.vector import load_bf16, load_f32, load_i64, machine_code, store_f32


def make_products(is_bf16: bool, gives_f32: bool) -> Callable[..., Any]:
    """The body: outputs = inputs x weights + biases; see the argument block."""
    pairs = _make_rows(PRODUCT_TILES, is_bf16, gives_f32)
    singles = _make_rows(1, is_bf16, gives_f32)
    size = 2 if is_bf16 and not gives_f32 else 4

    def products(arguments: int) -> None:
        count = load_i64(arguments + 8 * COUNT)
        steps = load_i64(arguments + 8 * P_STEPS)
        rows = load_i64(arguments + 8 * P_ROWS)
        x_stride = load_i64(arguments + 8 * P_INPUT_STRIDE)
        y_stride = load_i64(arguments + 8 * P_OUTPUT_STRIDE)
        tile_bytes = 4 * WIDTH * steps
        blocks = (rows + PRODUCT_ROWS - 1) // PRODUCT_ROWS
        while True:
            tile = fetch_add(arguments + 8 * NEXT, PRODUCT_TILES)
            if tile >= count:
                break
            w = load_i64(arguments + 8 * P_TILES) + tile_bytes * tile
            b = load_i64(arguments + 8 * P_BIAS) + 4 * WIDTH * tile
            first = 0
            for block in range(blocks):
                left = blocks - block
                some = (rows - first + left - 1) // left
                x = load_i64(arguments + 8 * P_INPUT) + x_stride * first
                y = load_i64(arguments + 8 * P_OUTPUT) + y_stride * first + size * WIDTH * tile
                if tile + PRODUCT_TILES <= count:
                    pairs(some, x, x_stride, w, tile_bytes, steps, y, y_stride, b)
                else:
                    for single in range(count - tile):
                        w_one = w + tile_bytes * single
                        y_one = y + size * WIDTH * single
                        b_one = b + 4 * WIDTH * single
                        singles(some, x, x_stride, w_one, tile_bytes, steps, y_one, y_stride, b_one)
                first += some

    return products


def make_embed(is_bf16: bool) -> Callable[..., Any]:
    """The body that picks rows out of tiles, as float32; see the argument block."""

    @machine_code
    def pick(tile: int, lane: int, steps: int, out: int) -> None:
        for step in range(steps):
            place = tile + 4 * (WIDTH * step + lane)
            if is_bf16:
                store_f32(out + 8 * step, load_bf16(place))
                store_f32(out + 8 * step + 4, load_bf16(place + 2))
            else:
                store_f32(out + 4 * step, load_f32(place))

    def embed(arguments: int) -> None:
        steps = load_i64(arguments + 8 * E_STEPS)
        count = load_i64(arguments + 8 * COUNT)
        run = load_i64(arguments + 8 * RUN)
        row_bytes = (8 if is_bf16 else 4) * steps
        while True:
            first = fetch_add(arguments + 8 * NEXT, run)
            if first >= count:
                break
            for row in range(first, min(count, first + run)):
                token = load_i64(load_i64(arguments + 8 * E_IDS) + 8 * row)
                tile = load_i64(arguments + 8 * E_TILES) + 4 * WIDTH * steps * (token // WIDTH)
                out = load_i64(arguments + 8 * E_OUT) + row_bytes * row
                pick(tile, token % WIDTH, steps, out)

    return embed


def _make_rows(tiles: int, is_bf16: bool, gives_f32: bool) -> Callable[..., Any]:
    """From 1 to PRODUCT_ROWS inputs against `tiles` tiles."""
    made = [make_product(rows, tiles, is_bf16, gives_f32) for rows in range(1, PRODUCT_ROWS + 1)]
    one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve = made

    @machine_code
    def product_rows(
        rows: int, x: int, xs: int, w: int, ws: int, steps: int, y: int, ys: int, b: int
    ) -> None:
        if rows == 1:
            one(x, xs, w, ws, steps, y, ys, b)
        elif rows == 2:
            two(x, xs, w, ws, steps, y, ys, b)
        elif rows == 3:
            three(x, xs, w, ws, steps, y, ys, b)
        elif rows == 4:
            four(x, xs, w, ws, steps, y, ys, b)
        elif rows == 5:
            five(x, xs, w, ws, steps, y, ys, b)
        elif rows == 6:
            six(x, xs, w, ws, steps, y, ys, b)
        elif rows == 7:
            seven(x, xs, w, ws, steps, y, ys, b)
        elif rows == 8:
            eight(x, xs, w, ws, steps, y, ys, b)
        elif rows == 9:
            nine(x, xs, w, ws, steps, y, ys, b)
        elif rows == 10:
            ten(x, xs, w, ws, steps, y, ys, b)
        elif rows == 11:
            eleven(x, xs, w, ws, steps, y, ys, b)
        else:
            twelve(x, xs, w, ws, steps, y, ys, b)

    return product_rows
