"""What C++ adds to, takes from and forbids in logits is what NumPy does, bit by bit.

A draw shows it: with a tiny temperature the greatest adjusted logit wins by its last bit, and where
the die falls tells of all the others.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native.drawing import NativeDraws
from services.executor.adjustment import adjust, is_adjusted
from services.executor.native_drawing import NativeDrawing
from services.executor.numpy_drawing import NumpyDrawing
from services.executor.sampler import Draw, NoToken, Sampler
from shared.sampling import DrawParams
from tests.executor.drawings import DRAWINGS, MAKERS
from tests.executor.plans import GREEDY, sample

NATIVE = [name for name in DRAWINGS if name != "numpy"]
PENALTIES = st.sampled_from([0.0, 0.0, 0.3, -1.1, 2.0, -2.0, 1e-300])


@st.composite
def adjusted_samples(draw, vocab_size):
    """A sample that asks for some of everything, often about the same few tokens."""
    near = st.integers(0, min(vocab_size, 40) - 1)
    ids = near | st.integers(0, vocab_size - 1)
    history = tuple(draw(st.lists(ids, min_size=1, max_size=60)))
    biases = draw(st.dictionaries(ids, st.floats(-100, 100), max_size=12))
    words = draw(st.lists(st.lists(near, min_size=1, max_size=3).map(tuple), max_size=4))
    wish = DrawParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.7, 1.0, 50.0])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        top_k=draw(st.sampled_from([0, 0, 3, 80])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        presence_penalty=draw(PENALTIES),
        frequency_penalty=draw(PENALTIES),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.1, 100.0, 1e-300])),
        logit_bias=tuple(biases.items()),
        allowed_token_ids=tuple(draw(st.just([]) | st.lists(ids, max_size=20))),
        bad_words=(*words, *draw(st.sampled_from([(), ((*history[-2:], 1),)]))),
    )
    return sample(
        draw=wish,
        history=history if wish.needs_history else (),
        num_prompt=draw(st.integers(1, len(history))) if wish.needs_history else 0,
        banned_ids=tuple(draw(st.lists(ids, max_size=3))),
    )


def logits_of(kind, vocab_size, dice):
    row = (dice.standard_normal(vocab_size) * 4).astype(np.float32)
    if kind == "whole numbers":
        row = row.round()
    elif kind == "huge":
        row *= np.float32(1e37)
    elif kind == "mostly excluded":
        row[dice.random(vocab_size) < 0.9] = -np.inf
        row[dice.integers(vocab_size)] = 1
    return row


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_adjusted_is_drawn_from_alike(name, data):
    vocab_size = data.draw(st.sampled_from([3, 16, 61, 64, 1000, 5001]))
    dice = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    samples = data.draw(st.lists(adjusted_samples(vocab_size), min_size=1, max_size=4))
    kind = data.draw(st.sampled_from(["random", "whole numbers", "huge", "mostly excluded"]))
    rows = [logits_of(kind, vocab_size, dice) for _ in samples]
    before = [row.copy() for row in rows]
    for _ in range(4):
        fallen = dice.random(len(rows))
        drawn = MAKERS[name]().draw(rows, samples, fallen)
        assert drawn == NumpyDrawing().draw(rows, samples, fallen)
    assert all(map(np.array_equal, rows, before))


ALONE = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "both": {"frequency_penalty": 0.123, "presence_penalty": -0.31},
    "bias": {"logit_bias": tuple((i, 0.1 * i) for i in range(0, 200, 3))},
}


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("kind", ALONE)
def test_each_alone_is_the_same_to_the_last_bit(name, kind):
    """Another token is as likely as the best, or by one bit likelier: then it is drawn."""
    dice = np.random.default_rng(0)
    history = tuple(dice.integers(0, 200, 300).tolist())
    wish = sample(draw=replace(GREEDY, **ALONE[kind]), history=history, num_prompt=100)
    for _ in range(200):
        row = (dice.standard_normal(201) * 0.5 + 3).astype(np.float32)
        row[200] = -9
        reference = row.copy()
        adjust(reference, wish)
        best = int(reference.argmax())
        for rival in (reference[best], np.nextafter(reference[best], np.float32(99))):
            row[200] = rival
            (drawn,) = MAKERS[name]().draw([row], [wish], np.zeros(1))
            assert drawn == (best if rival == reference[best] else 200)


@pytest.mark.parametrize("name", DRAWINGS)
def test_what_is_taken_for_repeating_is_rounded_once(name):
    """The sum of both penalties, in float64: its last bit shows where the logit itself is 0."""
    draw = DrawParams(temperature=0.0, frequency_penalty=0.123, presence_penalty=0.31)
    for times in range(1, 200):
        wish = sample(draw=draw, history=(1, *(0,) * times), num_prompt=1)
        taken = np.float32(times * 0.123 + 0.31)
        for rival, token in ((-taken, 0), (np.nextafter(-taken, np.float32(9)), 2)):
            row = np.array([0, -99, rival], np.float32)
            assert MAKERS[name]().draw([row], [wish], np.zeros(1)) == [token]


@pytest.fixture(params=DRAWINGS)
def sampler(request):
    return Sampler(MAKERS[request.param]())


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_is_none_whatever_is_excluded(sampler, poison):
    logits = np.zeros((1, 100), np.float32)
    logits[0, 7] = poison
    for wish in (sample(banned_ids=(7,)), sample(draw=DrawParams(allowed_token_ids=(1, 2)))):
        assert sampler.draw(logits, [Draw(0, 1, wish)]) == [NoToken.NOT_FINITE]


def test_when_all_is_excluded_nothing_is_drawn(sampler):
    logits = np.zeros((1, 4), np.float32)
    for wish in (GREEDY, DrawParams(), DrawParams(top_p=0.5), DrawParams(top_k=2)):
        told = [Draw(0, 1, sample(draw=wish, banned_ids=(0, 1, 2, 3)))]
        assert sampler.draw(logits, told) == [NoToken.ALL_EXCLUDED]


def test_adjusted_rows_are_drawn_from_in_c(monkeypatch):
    """Nothing of NumPy's runs: neither its adjustment nor its draws."""
    draws = NativeDraws()
    wish = sample(draw=DrawParams(presence_penalty=1.0, top_p=0.9), history=(1, 2), num_prompt=1)
    assert is_adjusted(wish)

    def fail(*_):
        raise AssertionError("NumPy adjusts")

    monkeypatch.setattr("services.executor.numpy_drawing.adjust", fail)
    tokens = Sampler(NativeDrawing(draws)).draw(np.zeros((1, 99), np.float32), [Draw(0, 2, wish)])
    assert draws.num_draws == 1
    assert 0 <= tokens[0] < 99
