"""What C++ tells of logits is what NumPy tells, bit by bit, over logits of every kind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native.drawing import NativeDraws
from services.executor.logprobs import Ask
from services.executor.native_drawing import NativeDrawing
from services.executor.numpy_drawing import NumpyDrawing
from services.executor.readout import read_out
from services.executor.sampler import Sampler
from shared.messages import Row, Sample
from tests.executor.drawings import DRAWINGS, MAKERS
from tests.executor.test_native_drawing import KINDS, row

NATIVE = [name for name in DRAWINGS if name != "numpy"]


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([*KINDS]),
    st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 600, 3000, 20_001]),
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.none() | st.integers(0, 10**5), st.sampled_from([0, 1, 5, 64, 65, 448])),
        min_size=1,
        max_size=5,
    ),
)
def test_they_tell_the_same(name, kind, vocab_size, seed, wanted):
    dice = np.random.default_rng(seed)
    asks = [
        Ask(row(kind, vocab_size, dice), None if token is None else token % vocab_size,
            max(num_top, int(token is None)))
        for token, num_top in wanted
    ]  # fmt: skip
    told = MAKERS[name]().tell(asks)
    assert told == NumpyDrawing().tell(asks)
    assert all(len(each.top) == min(ask.num_top, vocab_size)
               for ask, each in zip(asks, told, strict=True))  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_real_vocabulary_they_tell_the_same(name, kind):
    dice = np.random.default_rng(3)
    logits = row(kind, 49_152, dice)
    asks = [Ask(logits, None, 5), Ask(logits, 17, 20), Ask(logits, 49_151, 0), Ask(logits, 3, 900)]
    assert MAKERS[name]().tell(asks) == NumpyDrawing().tell(asks)


@pytest.mark.parametrize("name", DRAWINGS)
def test_rows_that_are_no_distribution_tell_nothing_and_others_beside_them_do(name):
    rows = [np.zeros(70, np.float32) for _ in range(5)]
    rows[0][69] = np.nan
    rows[1][0] = np.inf
    rows[2][:] = -np.inf
    rows[3][:] = np.nan
    told = MAKERS[name]().tell([Ask(each, None, 2) for each in rows])
    assert [each is None for each in told] == [True, True, True, True, False]
    assert told[4].top_ids == (0, 1)


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_rest_of_the_likeliest_is_what_is_ruled_out(name):
    logits = np.full(100, -np.inf, np.float32)
    logits[[40, 70]] = 1, 2
    (told,) = MAKERS[name]().tell([Ask(logits, None, 5)])
    assert told.top_ids == (70, 40, 0, 1, 2)
    assert told.top[2:] == (-np.inf,) * 3


def test_beams_are_told_their_likeliest_in_c():
    draws = NativeDraws()
    rows = [Row(i, (0,), 0, (i,), (Sample(i, 0, 0, None, num_top=5),)) for i in range(4)]
    logits = np.random.default_rng(1).standard_normal((4, 1000)).astype(np.float32)
    told = read_out(Sampler(NativeDrawing(draws)), rows, logits, {})
    assert draws.num_answers == 4
    assert told == read_out(Sampler(NumpyDrawing()), rows, logits, {})
