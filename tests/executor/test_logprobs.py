import math

import numpy as np
import pytest
import torch

from services.executor.logprobs import is_usable, likeliest, raw_logprobs


def random_row(seed, vocab_size, spread=4.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(vocab_size) * spread).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 2, 21, 512, 700, 49_152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0, 40.0])
def test_they_are_log_softmax(vocab_size, spread):
    row = random_row(7, vocab_size, spread)
    wanted = torch.from_numpy(row).double().log_softmax(-1)
    for token_id in {0, vocab_size // 2, vocab_size - 1}:
        found = raw_logprobs(row, token_id, 20)
        assert found.chosen == pytest.approx(float(wanted[token_id]), abs=1e-6)
        assert found.top == pytest.approx(wanted[list(found.top_ids)].tolist(), abs=1e-6)
        assert len(found.top_ids) == len(found.top) == min(20, vocab_size)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 512, 6000])
def test_the_best_are_in_order_and_of_equals_the_smaller_id_comes_first(vocab_size, has_ties):
    for seed in range(30):
        row = random_row(seed, vocab_size)
        row = row.round() if has_ties else row
        order = sorted(range(vocab_size), key=lambda i: (-row[i], i))
        for num_top in (0, 1, 2, 5, 20, 448):
            found = raw_logprobs(row, seed % vocab_size, num_top)
            assert found.top_ids == tuple(order[:num_top])
            assert list(found.top) == sorted(found.top, reverse=True)


def test_a_row_of_equals_names_the_smallest_ids():
    found = raw_logprobs(np.zeros(10_000, np.float32), 9_999, 3)
    assert found.top_ids == (0, 1, 2)
    assert found.rank == 1
    assert found.chosen == pytest.approx(-math.log(10_000))


def test_the_rank_counts_what_is_strictly_likelier():
    row = np.array([1, 5, 5, 2, 5, -math.inf, 9], np.float32)
    assert [raw_logprobs(row, i, 0).rank for i in range(7)] == [6, 2, 2, 5, 2, 7, 1]


def test_the_token_and_the_first_of_the_top_agree_to_the_last_bit():
    row = random_row(3, 49_152)
    best = raw_logprobs(row, int(row.argmax()), 1)
    assert best.top == (best.chosen,)
    assert best.rank == 1


@pytest.mark.parametrize("vocab_size", [1, 21, 700, 49_152])
@pytest.mark.parametrize("num_top", [1, 5, 448])
def test_without_a_choice_the_likeliest_stands_for_it(vocab_size, num_top):
    row = random_row(3, vocab_size)
    assert likeliest(row, num_top) == raw_logprobs(row, int(row.argmax()), num_top)


def test_what_the_model_rules_out_is_minus_infinity():
    row = np.array([0, -math.inf, 0], np.float32)
    assert raw_logprobs(row, 1, 3).chosen == -math.inf
    assert raw_logprobs(row, 0, 3).top == pytest.approx((-math.log(2), -math.log(2), -math.inf))


def test_far_apart_logits_do_not_overflow():
    row = np.array([3e38, -3e38, 0], np.float32)
    assert raw_logprobs(row, 0, 3).chosen == 0
    assert raw_logprobs(row, 0, 3).top_ids == (0, 2, 1)


@pytest.mark.parametrize("offset", range(9))
def test_a_rows_numbers_are_the_same_bits_wherever_it_lies(offset):
    row = random_row(5, 1_001)
    shelf = np.zeros(1_001 + offset, np.float32)
    shelf[offset:] = row
    assert raw_logprobs(shelf[offset:], 17, 20) == raw_logprobs(row, 17, 20)


@pytest.mark.parametrize(
    ("row", "usable"),
    [([0, 1], True), ([-math.inf, 1], True), ([math.nan, 1], False), ([math.inf, 1], False),
     ([-math.inf, -math.inf], False)],
)  # fmt: skip
def test_a_distribution_has_a_finite_peak(row, usable):
    assert is_usable(np.array(row, np.float32)) == usable
