"""Paged attention on the CPU: every key and value is read where it lies, through the block table.

A step is cut into items that threads take one after the other: some queries of one row (all query
heads of one key-value head together, so that its keys are read once) against a run of its keys.
Keys come in chunks of CHUNK_KEYS with the running maximum and sum of online softmax (Milakov and
Gimelshein 2018; Dao et al. 2022), begun anew every PART_KEYS; the parts are merged in order. The
parts of a single query may run on different threads: who finishes last merges them. All sums are
float32 and added in one order: a token's result is the same, bit by bit, alone or in any batch,
decoded or recomputed in a chunk of any size, in blocks of any size.
"""

from typing import Any, Final

import numpy as np

from kernels.cpu import vector
from kernels.cpu.arguments import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    CHUNK_KEYS,
    COUNT,
    DONE,
    END_KEY,
    FIRST_KEY,
    FIRST_PARTIAL,
    FIRST_TOKEN,
    GROUP,
    GROUP_INDEX,
    GROUP_WORDS,
    GROUPS,
    HEAD,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    ITEM_WORDS,
    ITEMS,
    NEXT,
    NUM_PARTS,
    NUM_QUERIES,
    OUT,
    PART_KEYS,
    PARTIAL,
    PARTIALS,
    POOL,
    QUERIES,
    ROW,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    TABLE_BYTES,
    TABLES,
    VISIBLE,
    W_GROUPS,
    W_ITEMS,
    W_KV_HEADS,
    W_LENGTHS,
    W_NUM_ITEMS,
    W_NUM_PARTIALS,
    W_NUM_ROWS,
    W_ROW_STARTS,
    W_TILE,
    WIDTH,
    WORKER,
)
from kernels.cpu.synchronise import fetch_add
from kernels.cpu.tiles import make_scores, make_values
from kernels.cpu.vector import (
    exp,
    first_of,
    fma,
    larger,
    largest_of,
    load_f32,
    load_i32,
    load_i64,
    load_row,
    machine_code,
    multiply,
    splat,
    store_f32,
    store_i64,
    store_row,
    subtract,
    sum_of,
)

FLOAT = np.float32
MINUS_INFINITY: Final = float("-inf")


def list_work(arguments: int) -> None:
    """Write the items and groups of one step; see the argument block above."""
    row_starts = load_i64(arguments + 8 * W_ROW_STARTS)
    lengths = load_i64(arguments + 8 * W_LENGTHS)
    kv_heads = load_i64(arguments + 8 * W_KV_HEADS)
    tile = load_i64(arguments + 8 * W_TILE)
    items = load_i64(arguments + 8 * W_ITEMS)
    groups = load_i64(arguments + 8 * W_GROUPS)
    num_items = 0
    num_groups = 0
    num_partials = 0
    for row in range(load_i64(arguments + 8 * W_NUM_ROWS)):
        start = load_i32(row_starts + 4 * row)
        num_tokens = load_i32(row_starts + 4 * row + 4) - start
        length = load_i32(lengths + 4 * row)
        last_tile = (num_tokens - 1) // tile * tile
        for step in range(0, num_tokens, tile):
            first = last_tile - step  # the tile with most keys comes first
            queries = min(tile, num_tokens - first)
            visible = length - num_tokens + first + 1
            end = visible + queries - 1
            parts = 1
            if num_tokens == 1:
                parts = (end + PART_KEYS - 1) // PART_KEYS
            for head in range(kv_heads):
                if parts > 1:
                    group = groups + 8 * GROUP_WORDS * num_groups
                    store_i64(group + 8 * FIRST_PARTIAL, num_partials)
                    store_i64(group + 8 * NUM_PARTS, parts)
                    store_i64(group + 8 * DONE, 0)
                for part in range(parts):
                    item = items + 8 * ITEM_WORDS * num_items
                    num_items += 1
                    store_i64(item + 8 * ROW, row)
                    store_i64(item + 8 * HEAD, head)
                    store_i64(item + 8 * FIRST_TOKEN, start + first)
                    store_i64(item + 8 * NUM_QUERIES, queries)
                    store_i64(item + 8 * VISIBLE, visible)
                    store_i64(item + 8 * GROUP_INDEX, num_groups)
                    if parts > 1:
                        store_i64(item + 8 * FIRST_KEY, part * PART_KEYS)
                        store_i64(item + 8 * END_KEY, min(end, (part + 1) * PART_KEYS))
                        store_i64(item + 8 * PARTIAL, num_partials)
                        num_partials += 1
                    else:
                        store_i64(item + 8 * FIRST_KEY, 0)
                        store_i64(item + 8 * END_KEY, end)
                        store_i64(item + 8 * PARTIAL, -1)
                if parts > 1:
                    num_groups += 1
    store_i64(arguments + 8 * W_NUM_ITEMS, num_items)
    store_i64(arguments + 8 * W_NUM_PARTIALS, num_partials)


@machine_code
def _soften(scores: int, count: int, padded: int, old: float) -> Any:
    """Scores to weights exp(score - maximum), in place; zero from `count` to `padded`.

    Returns: the new running maximum, and the sum of these weights.
    """
    for place in range(count, padded):
        store_f32(scores + 4 * place, FLOAT(MINUS_INFINITY))
    top = splat(old)
    for place in range(0, padded, WIDTH):
        top = larger(top, load_row(scores + 4 * place))
    new = largest_of(top)
    shift = splat(new)
    total = splat(FLOAT(0.0))
    for place in range(0, padded, WIDTH):
        weights = exp(subtract(load_row(scores + 4 * place), shift))
        store_row(scores + 4 * place, weights)
        total = vector.add(total, weights)
    for place in range(count, padded):
        store_f32(scores + 4 * place, FLOAT(0.0))
    return new, sum_of(total)


@machine_code
def _merge(sums: int, tops: int, more_sums: int, more_tops: int, padded: int) -> None:
    """Add another part's sums, maximum and weight to those of one row."""
    old, other = load_f32(tops), load_f32(more_tops)
    new = largest_of(larger(splat(old), splat(other)))
    factor, more_factor = exp(splat(old - new)), exp(splat(other - new))
    weight = multiply(splat(load_f32(tops + 4)), factor)
    weight = fma(splat(load_f32(more_tops + 4)), more_factor, weight)
    store_f32(tops, new)
    store_f32(tops + 4, first_of(weight))
    for column in range(0, padded, WIDTH):
        merged = multiply(load_row(sums + 4 * column), factor)
        merged = fma(load_row(more_sums + 4 * column), more_factor, merged)
        store_row(sums + 4 * column, merged)


@machine_code
def _copy(source: int, target: int, floats: int) -> None:
    for place in range(floats):
        store_f32(target + 4 * place, load_f32(source + 4 * place))


def make_attend(is_bf16: bool) -> Any:
    """The body each thread runs: takes items until none is left; see the argument block."""
    size = 2 if is_bf16 else 4
    load = vector.load_bf16 if is_bf16 else load_f32
    store = vector.store_bf16 if is_bf16 else store_f32
    add_all_scores = make_scores(is_bf16)
    add_gathered_scores = make_scores(is_bf16=False)
    add_all_values = make_values(is_bf16)

    @machine_code
    def score_chunk(
        arguments: int, item: int, chunk: int, count: int, rows: int, q: int, scores: int, tile: int
    ) -> None:
        """Scores of all rows against `count` keys from `chunk` on."""
        block_size = load_i64(arguments + 8 * BLOCK_SIZE)
        block_bytes = load_i64(arguments + 8 * BLOCK_BYTES)
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        pool = load_i64(arguments + 8 * POOL)
        pool += load_i64(item + 8 * HEAD) * load_i64(arguments + 8 * HEAD_BYTES)
        table = load_i64(arguments + 8 * TABLES)
        table += load_i64(item + 8 * ROW) * load_i64(arguments + 8 * TABLE_BYTES)
        q_stride = 4 * head_dim
        for first in range(0, count, WIDTH):
            place = chunk + first
            target = scores + 4 * first
            if block_size % WIDTH == 0:
                keys = pool + load_i32(table + 4 * (place // block_size)) * block_bytes
                keys += size * (place % block_size)
                add_all_scores(rows, q, q_stride, keys, size * block_size, head_dim, target)
                continue
            for token in range(WIDTH):  # blocks of odd sizes: gather a tile first
                there = min(place + token, chunk + count - 1)
                keys = pool + load_i32(table + 4 * (there // block_size)) * block_bytes
                keys += size * (there % block_size)
                for d in range(head_dim):
                    store_f32(
                        tile + 4 * (d * WIDTH + token), FLOAT(load(keys + size * block_size * d))
                    )
            add_gathered_scores(rows, q, q_stride, tile, 4 * WIDTH, head_dim, target)

    @machine_code
    def add_chunk(
        arguments: int, item: int, chunk: int, count: int, rows: int, scores: int, sums: int
    ) -> None:
        """Weights times values of `count` tokens from `chunk` on, added to the sums."""
        block_size = load_i64(arguments + 8 * BLOCK_SIZE)
        block_bytes = load_i64(arguments + 8 * BLOCK_BYTES)
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        pool = load_i64(arguments + 8 * POOL) + size * head_dim * block_size
        pool += load_i64(item + 8 * HEAD) * load_i64(arguments + 8 * HEAD_BYTES)
        table = load_i64(arguments + 8 * TABLES)
        table += load_i64(item + 8 * ROW) * load_i64(arguments + 8 * TABLE_BYTES)
        place = chunk
        while place < chunk + count:
            offset = place % block_size
            tokens = min(block_size - offset, chunk + count - place)
            values = pool + load_i32(table + 4 * (place // block_size)) * block_bytes
            values += size * head_dim * offset
            add_all_values(
                rows, scores + 4 * (place - chunk), values, size * head_dim, tokens, sums, head_dim
            )
            place += tokens

    @machine_code
    def attend_part(
        arguments: int, item: int, rows: int, first: int, end: int, q: int, place: int
    ) -> None:
        """Sums, maxima and weights of keys `first` to `end`; `place` is where the sums go."""
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        padded = (head_dim + WIDTH - 1) // WIDTH * WIDTH
        group_size = load_i64(arguments + 8 * GROUP)
        tops = place + 4 * rows * padded  # [rows, 2]: running maximum, total weight
        scores = tops + 8 * rows  # [rows, CHUNK_KEYS]
        tile = scores + 4 * rows * CHUNK_KEYS  # [head_dim, WIDTH]
        for row in range(rows):
            for column in range(0, padded, WIDTH):
                store_row(place + 4 * (padded * row + column), splat(FLOAT(0.0)))
            store_f32(tops + 8 * row, FLOAT(MINUS_INFINITY))
            store_f32(tops + 8 * row + 4, FLOAT(0.0))
        for chunk in range(first, end, CHUNK_KEYS):
            count = min(CHUNK_KEYS, end - chunk)
            tiled = (count + WIDTH - 1) // WIDTH * WIDTH
            score_chunk(arguments, item, chunk, count, rows, q, scores, tile)
            for row in range(rows):
                seen = load_i64(item + 8 * VISIBLE) + row // group_size - chunk
                seen = min(count, seen)
                weights = scores + 4 * CHUNK_KEYS * row
                if seen <= 0:
                    for key in range(0, tiled, WIDTH):
                        store_row(weights + 4 * key, splat(FLOAT(0.0)))
                    continue
                old = load_f32(tops + 8 * row)
                new, total = _soften(weights, seen, tiled, old)
                factor = exp(splat(old - new))
                weight = fma(splat(load_f32(tops + 8 * row + 4)), factor, splat(total))
                store_f32(tops + 8 * row, new)
                store_f32(tops + 8 * row + 4, first_of(weight))
                if old != new:
                    for column in range(0, padded, WIDTH):
                        at = place + 4 * (padded * row + column)
                        store_row(at, multiply(load_row(at), factor))
            add_chunk(arguments, item, chunk, count, rows, scores, place)

    @machine_code
    def write_out(arguments: int, item: int, rows: int, sums: int, tops: int) -> None:
        """Weighted means, in the dtype of the queries."""
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        padded = (head_dim + WIDTH - 1) // WIDTH * WIDTH
        heads = load_i64(arguments + 8 * HEADS)
        group_size = load_i64(arguments + 8 * GROUP)
        first_head = load_i64(item + 8 * HEAD) * group_size
        for row in range(rows):
            inverse = FLOAT(1.0) / load_f32(tops + 8 * row + 4)
            token = load_i64(item + 8 * FIRST_TOKEN) + row // group_size
            target = load_i64(arguments + 8 * OUT)
            target += size * head_dim * (token * heads + first_head + row % group_size)
            for d in range(head_dim):
                store(target + size * d, load_f32(sums + 4 * (padded * row + d)) * inverse)

    @machine_code
    def hand_in(arguments: int, item: int, rows: int, sums: int) -> None:
        """Leave one part's result; who hands in the last part merges all, in order."""
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        padded = (head_dim + WIDTH - 1) // WIDTH * WIDTH
        floats = rows * (padded + 2)  # sums, then tops
        partials = load_i64(arguments + 8 * PARTIALS)
        _copy(sums, partials + 4 * floats * load_i64(item + 8 * PARTIAL), floats)
        group = load_i64(arguments + 8 * GROUPS)
        group += 8 * GROUP_WORDS * load_i64(item + 8 * GROUP_INDEX)
        parts = load_i64(group + 8 * NUM_PARTS)
        if fetch_add(group + 8 * DONE, 1) < parts - 1:
            return
        store_i64(group + 8 * DONE, 0)
        total = partials + 4 * floats * load_i64(group + 8 * FIRST_PARTIAL)
        tops = total + 4 * rows * padded
        for part in range(1, parts):
            more = total + 4 * floats * part
            for row in range(rows):
                at = 4 * padded * row
                more_tops = more + 4 * rows * padded + 8 * row
                _merge(total + at, tops + 8 * row, more + at, more_tops, padded)
        write_out(arguments, item, rows, total, tops)

    @machine_code
    def attend_item(arguments: int, item: int, scratch: int) -> None:
        """One item, start to end."""
        head_dim = load_i64(arguments + 8 * HEAD_DIM)
        padded = (head_dim + WIDTH - 1) // WIDTH * WIDTH
        group_size = load_i64(arguments + 8 * GROUP)
        rows = load_i64(item + 8 * NUM_QUERIES) * group_size
        q = scratch  # [rows, head_dim]
        sums = q + 4 * rows * padded  # [rows, padded]
        tops = sums + 4 * rows * padded  # [rows, 2]
        more = tops + 8 * rows  # the same for a later part, and the scores
        more_tops = more + 4 * rows * padded
        scale = load_f32(arguments + 8 * SCALE)
        heads = load_i64(arguments + 8 * HEADS)
        for row in range(rows):
            token = load_i64(item + 8 * FIRST_TOKEN) + row // group_size
            head = load_i64(item + 8 * HEAD) * group_size + row % group_size
            source = load_i64(arguments + 8 * QUERIES) + size * head_dim * (token * heads + head)
            for d in range(head_dim):
                store_f32(q + 4 * (head_dim * row + d), load(source + size * d) * scale)
        first = load_i64(item + 8 * FIRST_KEY)
        end = load_i64(item + 8 * END_KEY)
        attend_part(arguments, item, rows, first, min(end, first + PART_KEYS), q, more)
        if load_i64(item + 8 * PARTIAL) >= 0:
            hand_in(arguments, item, rows, more)
            return
        if end - first <= PART_KEYS:
            write_out(arguments, item, rows, more, more_tops)
            return
        _copy(more, sums, rows * (padded + 2))
        for part in range(first + PART_KEYS, end, PART_KEYS):
            attend_part(arguments, item, rows, part, min(end, part + PART_KEYS), q, more)
            for row in range(rows):
                if load_i64(item + 8 * VISIBLE) + row // group_size > part:
                    at = 4 * padded * row
                    _merge(sums + at, tops + 8 * row, more + at, more_tops + 8 * row, padded)
        write_out(arguments, item, rows, sums, tops)

    def attend(arguments: int) -> None:
        scratch = load_i64(arguments + 8 * SCRATCH)
        scratch += fetch_add(arguments + 8 * WORKER, 1) * load_i64(arguments + 8 * SCRATCH_BYTES)
        while True:
            index = fetch_add(arguments + 8 * NEXT, 1)
            if index >= load_i64(arguments + 8 * COUNT):
                break
            attend_item(
                arguments, load_i64(arguments + 8 * ITEMS) + 8 * ITEM_WORDS * index, scratch
            )

    return attend
