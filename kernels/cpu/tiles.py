"""Any number of query rows against a tile of keys or a run of values, by micro-kernels of few rows.

Rows are taken six at a time, the rest by four, three, two or one: what a register file holds.
"""

from collections.abc import Callable
from typing import Any, Final

from kernels.cpu.arguments import CHUNK_KEYS, WIDTH
from kernels.cpu.microkernels import make_add_values, make_score_tile
from kernels.cpu.vector import machine_code

ROW_COUNTS: Final = (1, 2, 3, 4, 6)
SCORE_STRIDE: Final = 4 * CHUNK_KEYS


def make_scores(is_bf16: bool) -> Callable[..., Any]:
    """Scores of rows against 16 keys: (rows, queries, query stride, keys, key stride, head_dim,
    scores); strides in bytes.
    """
    one, two, three, four, six = (make_score_tile(rows, is_bf16) for rows in ROW_COUNTS)

    @machine_code
    def score_rows(
        rows: int, q: int, q_stride: int, k: int, k_stride: int, size: int, s: int
    ) -> None:
        row = 0
        while rows - row >= 6:
            at = s + row * SCORE_STRIDE
            six(q + row * q_stride, q_stride, k, k_stride, size, at, SCORE_STRIDE)
            row += 6
        if rows - row >= 4:
            at = s + row * SCORE_STRIDE
            four(q + row * q_stride, q_stride, k, k_stride, size, at, SCORE_STRIDE)
            row += 4
        at = s + row * SCORE_STRIDE
        if rows - row == 3:
            three(q + row * q_stride, q_stride, k, k_stride, size, at, SCORE_STRIDE)
        elif rows - row == 2:
            two(q + row * q_stride, q_stride, k, k_stride, size, at, SCORE_STRIDE)
        elif rows - row == 1:
            one(q + row * q_stride, q_stride, k, k_stride, size, at, SCORE_STRIDE)

    return score_rows


def make_values(is_bf16: bool) -> Callable[..., Any]:
    """Weights times a run of values: (rows, weights, values, value stride, tokens, sums, head_dim).

    Strides in bytes; sums are whole vectors, whose numbers past head_dim mean nothing.
    """
    size = 2 if is_bf16 else 4
    add_four = _make_columns(4, is_bf16)
    add_one = _make_columns(1, is_bf16)

    @machine_code
    def add_values(rows: int, p: int, v: int, v_stride: int, n: int, a: int, head_dim: int) -> None:
        columns = (head_dim + WIDTH - 1) // WIDTH
        a_stride = 4 * WIDTH * columns
        column = 0
        while columns - column >= 4:
            at = column * WIDTH
            add_four(rows, p, v + size * at, v_stride, n, a + 4 * at, a_stride)
            column += 4
        while column < columns:
            at = column * WIDTH
            add_one(rows, p, v + size * at, v_stride, n, a + 4 * at, a_stride)
            column += 1

    return add_values


def _make_columns(columns: int, is_bf16: bool) -> Callable[..., Any]:
    """The same for 16 * `columns` numbers of each value."""
    one, two, three, four, six = (make_add_values(rows, columns, is_bf16) for rows in ROW_COUNTS)

    @machine_code
    def add_rows(rows: int, p: int, v: int, v_stride: int, n: int, a: int, a_stride: int) -> None:
        row = 0
        while rows - row >= 6:
            at = a + row * a_stride
            six(p + row * SCORE_STRIDE, SCORE_STRIDE, v, v_stride, n, at, a_stride)
            row += 6
        if rows - row >= 4:
            at = a + row * a_stride
            four(p + row * SCORE_STRIDE, SCORE_STRIDE, v, v_stride, n, at, a_stride)
            row += 4
        at = a + row * a_stride
        if rows - row == 3:
            three(p + row * SCORE_STRIDE, SCORE_STRIDE, v, v_stride, n, at, a_stride)
        elif rows - row == 2:
            two(p + row * SCORE_STRIDE, SCORE_STRIDE, v, v_stride, n, at, a_stride)
        elif rows - row == 1:
            one(p + row * SCORE_STRIDE, SCORE_STRIDE, v, v_stride, n, at, a_stride)

    return add_rows
