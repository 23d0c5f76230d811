import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.numpy_drawing import kept
from services.executor.sampler import Draw, NoToken, Sampler
from shared.sampling import DrawParams
from tests.executor import plain_sampler
from tests.executor.drawings import DRAWINGS, MAKERS
from tests.executor.plans import GREEDY, sample


def random_logits(seed, num_rows=1, vocab_size=600, spread=3.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)


@pytest.fixture(params=DRAWINGS)
def sampler(request):
    return Sampler(MAKERS[request.param]())


def draw_one(sampler, logits, params, **more):
    """The token drawn from one row, [vocab_size]."""
    position = more.pop("position", 0)
    wish = Draw(0, position, sample(draw=params, **more))
    return sampler.draw(logits[None], [wish])[0]


def kept_ids(logits, params):
    return kept(logits, params)[0]


ANY_PARAMS = st.builds(
    DrawParams,
    temperature=st.sampled_from([1e-30, 0.01, 0.3, 1.0, 2.0, 100.0]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 599, 600, 10_000]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
)


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 5, 600, 3000]),
    st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    ANY_PARAMS,
    st.booleans(),
)
def test_what_is_kept_equals_a_full_sort(seed, vocab_size, spread, params, has_ties):
    logits = random_logits(seed, vocab_size=vocab_size, spread=spread)[0]
    logits = logits.round() if has_ties else logits
    weights = np.exp((logits - logits.max()) / max(params.temperature, 1e-38))
    found = {int(i) for i in kept_ids(logits, params) if weights[i] > 1e-9}
    expected = {i for i in plain_sampler.kept(logits, params) if weights[i] > 1e-9}
    # In float32 and float64 the threshold may fall on either side of a token that lies on it.
    assert len(found ^ expected) <= 1
    if found ^ expected:
        (odd,) = found ^ expected
        edge = min(plain_sampler.kept(logits, params).values())
        assert weights[odd] / weights[list(expected)].sum() == pytest.approx(edge, rel=0.05)


def test_of_equal_logits_the_smaller_ids_are_kept():
    logits = np.zeros(2000, np.float32)
    logits[7] = 1
    assert kept_ids(logits, DrawParams(top_k=3)).tolist() == [0, 1, 7]
    logits = np.zeros(2000, np.float32)
    assert kept_ids(logits, DrawParams(top_p=0.5)).tolist() == list(range(1000))


def test_top_p_keeps_the_token_that_reaches_it_and_no_more():
    logits = np.log(np.array([0.25, 0.125, 0.5, 0.125], np.float32))
    assert kept_ids(logits, DrawParams(top_p=0.5)).tolist() == [2]
    assert kept_ids(logits, DrawParams(top_p=0.51)).tolist() == [0, 2]
    assert kept_ids(logits, DrawParams(top_p=0.8)).tolist() == [0, 1, 2]


def test_top_p_is_a_share_of_what_top_k_kept():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # 0.4 is 57 % of the first two, and 40 % of all.
    assert kept_ids(logits, DrawParams(top_k=2, top_p=0.55)).tolist() == [0]
    assert kept_ids(logits, DrawParams(top_p=0.55)).tolist() == [0, 1]


def test_min_p_is_relative_to_the_greatest_probability():
    logits = np.log(np.array([0.5, 0.26, 0.24], np.float32))
    assert kept_ids(logits, DrawParams(min_p=0.5)).tolist() == [0, 1]


def test_greedy_takes_the_first_of_equals(sampler):
    assert draw_one(sampler, np.array([1, 5, 5, 2], np.float32), GREEDY) == 1


@pytest.mark.parametrize(
    "params",
    [GREEDY, DrawParams(), DrawParams(top_p=0.99), DrawParams(top_k=2), DrawParams(min_p=0.001)],
)
def test_what_is_banned_is_never_drawn(sampler, params):
    logits = np.array([9, 8, 7, 6], np.float32)
    drawn = {draw_one(sampler, logits, params, banned_ids=(0, 1), position=p) for p in range(50)}
    assert drawn <= {2, 3}
    assert logits.tolist() == [9, 8, 7, 6]  # the ban is this draw's alone


ALL_KINDS = [
    GREEDY,
    DrawParams(),
    DrawParams(temperature=0.7),
    DrawParams(min_p=0.05),
    DrawParams(top_p=0.9),
    DrawParams(top_k=40, top_p=0.95, min_p=0.01, temperature=0.8),
]


@pytest.mark.parametrize("vocab_size", [512, 1000, 49_152])
def test_a_draw_is_the_same_alone_and_in_any_company(sampler, vocab_size):
    logits = random_logits(3, num_rows=24, vocab_size=vocab_size)
    draws = [
        Draw(i, 10 + i, sample(i, ALL_KINDS[i % len(ALL_KINDS)], seed=i, banned_ids=(i,) * (i % 2)))
        for i in range(24)
    ]
    together = sampler.draw(logits, draws)
    backwards = sampler.draw(logits, draws[::-1])[::-1]
    alone = [sampler.draw(logits[d.row : d.row + 1], [Draw(0, d.position, d.sample)])[0]
             for d in draws]  # fmt: skip
    assert together == backwards == alone
    assert all(
        plain_sampler.is_right(token, logits[d.row], d.sample, d.position)
        for token, d in zip(together, draws, strict=True)
        if vocab_size < 49_152
    )


def test_the_sums_of_a_row_are_the_same_bits_in_any_company(sampler):
    """A draw whose die lies exactly on a border would show the last bit; make many borders."""
    logits = random_logits(5, num_rows=128, vocab_size=512, spread=0.01)
    for first in range(0, 128, 16):
        draws = [Draw(i, first, sample(i, DrawParams(), seed=1)) for i in range(128)]
        part = draws[first : first + 3]
        assert sampler.draw(logits, draws)[first : first + 3] == sampler.draw(logits, part)


@pytest.mark.parametrize(
    "params", [DrawParams(), DrawParams(temperature=1.7), DrawParams(top_k=9),
               DrawParams(top_p=0.8), DrawParams(min_p=0.1),
               DrawParams(top_k=12, top_p=0.9, min_p=0.02, temperature=0.6)],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [20, 700])
def test_tokens_come_as_often_as_they_should(sampler, params, vocab_size):
    """Chi-square over 10,000 draws against the plain reference; the seed is fixed."""
    logits = random_logits(11, vocab_size=vocab_size, spread=1.5)
    count = 10_000
    draws = [Draw(0, p, sample(draw=params, seed=42)) for p in range(count)]
    found = Counter(sampler.draw(logits, draws))
    expected = {i: p * count for i, p in plain_sampler.kept(logits[0], params).items()}
    assert set(found) <= set(expected)
    rare = sum(e for e in expected.values() if e < 10)
    rarely = sum(found[i] for i, e in expected.items() if e < 10)
    cells = [(found[i], e) for i, e in expected.items() if e >= 10]
    cells += [(rarely, rare)] if rare else []
    chi_square = sum((f - e) ** 2 / e for f, e in cells)
    freedom = max(len(cells) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("params", ALL_KINDS)
@pytest.mark.parametrize(
    "bad", [[math.nan, 0, 0, 0], [-math.inf] * 4, [0, 0, math.inf, 0]], ids=["nan", "none", "inf"]
)
def test_a_row_without_sense_fails_alone(sampler, params, bad):
    logits = np.array([[1, 2, 3, 4], bad, [4, 3, 2, 1]], np.float32)
    draws = [Draw(i, 0, sample(i, params)) for i in range(3)]
    found = sampler.draw(logits, draws)
    assert found[1] is NoToken.NOT_FINITE
    good = sampler.draw(logits[[0, 2]], [draws[0], Draw(1, 0, draws[2].sample)])
    assert [found[0], found[2]] == good
    assert {type(token) for token in good} == {int}


@pytest.mark.parametrize("params", ALL_KINDS)
@pytest.mark.parametrize(
    ("excluding", "banned_ids"),
    [
        ({}, (0, 1, 2)),
        ({"bad_words": ((0,), (1,), (2,))}, ()),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, ()),
        ({"allowed_token_ids": (1, 2)}, (2, 1)),
    ],
)
def test_when_all_is_excluded_the_request_is_to_blame_not_the_logits(
    sampler, params, excluding, banned_ids
):
    params = replace(params, **excluding)
    assert (
        draw_one(sampler, np.zeros(3, np.float32), params, banned_ids=banned_ids)
        is NoToken.ALL_EXCLUDED
    )


@pytest.mark.parametrize("params", ALL_KINDS)
def test_a_nan_does_not_hide_among_what_is_excluded(sampler, params):
    logits = np.array([1, 2, math.nan], np.float32)
    assert draw_one(sampler, logits, params, banned_ids=(2,)) is NoToken.NOT_FINITE
    only = replace(params, allowed_token_ids=(0, 1))
    assert draw_one(sampler, logits, only) is NoToken.NOT_FINITE


def test_a_row_may_be_drawn_from_many_times(sampler):
    logits = random_logits(2)
    draws = [Draw(0, 5, sample(i, DrawParams(), index=i, seed=9)) for i in range(50)]
    assert len(set(sampler.draw(logits, draws))) > 10


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6])
def test_a_tiny_temperature_is_greedy_and_no_division_by_zero(sampler, temperature):
    logits = random_logits(4)[0]
    for top_p in (1.0, 0.9):
        params = DrawParams(temperature=temperature, top_p=top_p)
        assert draw_one(sampler, logits, params) == int(logits.argmax())
