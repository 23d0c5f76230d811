import numpy as np
import pytest

from services.executor.philox import philox4x32, uniforms
from tests.executor import plain_philox

# The known answers of Random123 (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_it_gives_the_known_answers(counter, key, output):
    found = philox4x32(np.array([words(counter)], np.uint32), np.array([words(key)], np.uint32))
    assert found.tolist() == [words(output)]
    assert list(plain_philox.philox4x32(words(counter), words(key))) == words(output)


def test_many_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(1)
    seeds = [int(seed) for seed in rng.integers(-(2**63), 2**63, 200)]
    indexes = [int(index) for index in rng.integers(0, 2**40, 200)]
    positions = [int(position) for position in rng.integers(0, 2**20, 200)]
    expected = [plain_philox.uniform(*draw) for draw in zip(seeds, indexes, positions, strict=True)]
    assert uniforms(seeds, indexes, positions).tolist() == expected


def test_every_part_of_a_draws_name_matters():
    dice = uniforms([1, 2, 1, 1, -1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0])
    assert len(set(dice)) == 5


def test_a_die_is_below_one():
    dice = uniforms([3] * 10_000, [0] * 10_000, range(10_000))
    assert dice.min() >= 0
    assert dice.max() < 1
    assert abs(dice.mean() - 0.5) < 0.02
