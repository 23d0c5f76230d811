"""Work lists: every query meets every key that it sees once, in splits that are its own."""

import doctest

import numpy as np
import pytest

from kernels.triton_gpu import tiles, work
from kernels.triton_gpu.tiles import decode_tile, padded, prefill_tile
from kernels.triton_gpu.work import SPLIT_TOKENS, StepWork, WorkList, step_work

DECODE_KEYS, PREFILL_KEYS, TILE_TOKENS = 64, 32, 16


def work_of(rows: list[tuple[int, int]], window: int = 0) -> StepWork:
    starts = np.cumsum([0, *(new for _, new in rows)]).tolist()
    lengths = [length for length, _ in rows]
    return step_work(starts, lengths, window, TILE_TOKENS, DECODE_KEYS, PREFILL_KEYS)


def seen(work: WorkList, window: int) -> dict[int, list[int]]:
    """By packed token, the keys that its items go over and let it see."""
    keys: dict[int, list[int]] = {}
    for _, token, count, position, begin, end, _, plain_to in work.items.tolist():
        for i in range(count):
            last = position + i
            first = max(0, last - window + 1) if window else 0
            assert plain_to <= last + 1
            assert begin == plain_to if window else plain_to <= end
            keys.setdefault(token + i, []).extend(range(max(first, begin), min(last + 1, end)))
    return keys


@pytest.mark.parametrize("window", [0, 1, 40, 300])
def test_every_query_meets_its_keys_once(window: int) -> None:
    random = np.random.default_rng(window)
    rows = [(1, 1), (256, 1), (257, 1), (600, 600), (40, 2)]
    for _ in range(20):
        length = int(random.integers(1, 900))
        rows.append((length, int(random.choice([1, random.integers(1, length + 1)]))))
    work = work_of(rows, window)
    keys = seen(work.decode, window) | seen(work.prefill, window)
    token = 0
    for length, new in rows:
        for last in range(length - new, length):
            first = max(0, last - window + 1) if window else 0
            assert keys[token] == list(range(first, last + 1))
            token += 1
    assert len(keys) == token


def test_splits_are_counted_from_the_start_and_folded_in_order() -> None:
    work = work_of([(100, 1), (600, 1), (256, 1), (513, 1)]).decode
    splits = work.items[:, [0, 4, 5, 6]].tolist()
    assert splits == [
        *([0, 0, 100, -1], [1, 0, 256, 0], [1, 256, 512, 1], [1, 512, 600, 2]),
        *([2, 0, 256, -1], [3, 0, 256, 3], [3, 256, 512, 4], [3, 512, 513, 5]),
    ]
    assert work.folds.tolist() == [[1, 0, 3, 0], [3, 3, 3, 0]]
    assert work.num_partials == 6


def test_the_longest_tiles_of_prefill_start_first() -> None:
    items = work_of([(20, 20), (500, 30), (100, 1)]).prefill.items
    lengths = (items[:, 5] - items[:, 4]).tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert len(items) == 4


def test_the_examples_in_the_docstrings() -> None:
    results = [doctest.testmod(module) for module in (tiles, work)]
    assert [result.failed for result in results] == [0, 0]
    assert sum(result.attempted for result in results) > 1


def test_a_batch_of_nothing() -> None:
    work = work_of([])
    assert work.decode.items.shape == work.prefill.items.shape == (0, 8)
    assert work.decode.folds.shape == (0, 4)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_tiles_divide_a_split_and_hold_a_group(head_dim: int) -> None:
    for group in (1, 4, 7, 71):
        decode = decode_tile(head_dim, 2, 2, group)
        prefill = prefill_tile(head_dim, 2, group, 232_448)
        assert SPLIT_TOKENS % decode.keys == 0
        assert min(decode.rows, prefill.rows) >= group
        assert padded(head_dim) >= head_dim
