from dataclasses import fields

import numpy as np

from services.executor.batch import flatten, logit_tokens, pack
from shared.messages import Score
from tests.executor.plans import row


def packed(*rows, block_size=4):
    flat = flatten(rows, block_size)
    return pack(flat, flat.token_ids, logit_tokens(rows, flat))


def test_prefill_and_decode_rows_lie_end_to_end():
    batch = packed(
        row((10, 11, 12), 3, (5, 2), sequence_id=1, samples=[]),
        row((20,), 8, (4, 0, 7), sequence_id=2),
        row((30, 31), 0, (6,), sequence_id=3),
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 7 * 4, 6 * 4, 6 * 4 + 1]
    assert batch.row_starts.tolist() == [0, 3, 4, 6]
    assert batch.context_lengths.tolist() == [6, 9, 2]
    assert [batch.block_tables[i, :n].tolist() for i, n in enumerate((2, 3, 1))] == [
        [5, 2], [4, 0, 7], [6],
    ]  # fmt: skip
    assert batch.logit_tokens.tolist() == [3, 5]


def test_what_is_scored_comes_after_what_is_sampled():
    batch = packed(
        row((10, 11, 12), 3, (5, 2), sequence_id=1, samples=[], score=Score(4, (12, 13), 0)),
        row((20,), 8, (4, 0, 7), sequence_id=2),
        row((30, 31), 0, (6,), sequence_id=3, score=Score(0, (31,), 2)),
    )
    assert batch.logit_tokens.tolist() == [3, 5, 1, 2, 4]


def test_a_table_longer_than_its_sequence_is_cut():
    batch = packed(row((10,), 0, (5, 2, 3, 1)), row((20,), 5, (4, 0, 7), sequence_id=2))
    assert batch.block_tables.shape == (2, 2)
    assert batch.block_tables[1].tolist() == [4, 0]


def test_the_dtypes_are_the_contracts():
    batch = packed(row())
    dtypes = {
        field.name: str(getattr(batch, field.name).dtype).removeprefix("torch.")
        for field in fields(batch)
    }
    assert dtypes == {
        "token_ids": "int64",
        "positions": "int32",
        "slots": "int64",
        "row_starts": "int32",
        "context_lengths": "int32",
        "block_tables": "int32",
        "logit_tokens": "int64",
    }


def test_random_rows_equal_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        block_size = int(rng.choice([1, 3, 8, 16]))
        blocks = iter(rng.permutation(2000).tolist())
        rows = []
        for number in range(rng.integers(1, 12)):
            first, count = int(rng.integers(0, 60)), int(rng.integers(1, 30))
            table = [next(blocks) for _ in range(-(-(first + count) // block_size))]
            ids = rng.integers(0, 512, count).tolist()
            rows.append(row(ids, first, table, sequence_id=number))
        batch = packed(*rows, block_size=block_size)
        places = [(r, r.first_position + i) for r in rows for i in range(len(r.token_ids))]
        assert batch.slots.tolist() == [
            r.block_table[p // block_size] * block_size + p % block_size for r, p in places
        ]
        assert batch.positions.tolist() == [p for _, p in places]
        assert batch.block_tables.shape[1] == max(len(r.block_table) for r in rows)
        assert all(
            tuple(batch.block_tables[i, : len(r.block_table)].tolist()) == r.block_table
            for i, r in enumerate(rows)
        )
