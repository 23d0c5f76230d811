"""What C++ draws is what NumPy draws, token for token, over logits of every kind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.numpy_drawing import NumpyDrawing
from shared.sampling import DrawParams
from tests.executor.drawings import DRAWINGS, MAKERS
from tests.executor.plans import sample

NATIVE = [name for name in DRAWINGS if name != "numpy"]


def random(vocab_size, dice, spread=3.0):
    return dice.standard_normal(vocab_size) * spread


KINDS = {
    "random": random,
    "nearly flat": lambda size, dice: random(size, dice, 1e-3),
    "flat": lambda size, _: np.zeros(size),
    "a huge spread": lambda size, dice: random(size, dice, 1e37),
    "tied": lambda size, dice: random(size, dice).round(),
    "tied at the edge": lambda size, dice: dice.choice([0.0, 1.0, 1.0, 1.0, 2.0], size),
    "mostly excluded": lambda size, dice: np.where(
        dice.random(size) < 0.9, -np.inf, random(size, dice)
    ),
    "one alone": lambda size, dice: np.where(
        np.arange(size) == dice.integers(size), 5.0, -np.inf
    ),
    "one far ahead": lambda size, dice: np.where(np.arange(size) == size // 2, 80.0, 0.0),
    "ever closer": lambda size, _: -(2.0 ** -np.arange(size)),
    "ever farther": lambda size, _: -(1.1 ** (np.arange(size) % 800)),
    "neighbours in float32": lambda size, dice: 1 + dice.integers(0, 3, size) * 2.0**-23,
    "of a trained model": lambda size, dice: 12 * dice.standard_exponential(size) ** 0.5,
}  # fmt: skip


def row(kind, vocab_size, dice):
    """[vocab_size] float32, at least one finite."""
    logits = np.asarray(KINDS[kind](vocab_size, dice)).astype(np.float32)
    logits[dice.integers(vocab_size)] = 0.5
    return logits


def draw(drawing, rows, wishes, dice):
    return drawing.draw(rows, [sample(draw=wish) for wish in wishes], dice)


WISHES = st.builds(
    DrawParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.7, 1.0, 1.0, 5.0, 100.0]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 1e-16]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 127, 128, 129, 600, 40_000, 2**70]),
    min_p=st.sampled_from([0.0, 0.0, 1e-40, 1e-7, 0.05, 0.5, 1.0]),
)
DICE = [0.0, 1e-17, 0.25, 0.5, 1 - 2**-53]


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([*KINDS]),
    st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 600, 3000, 20_001]),
    st.integers(0, 10**6),
    st.lists(WISHES, min_size=1, max_size=6),
)
def test_they_draw_the_same(name, kind, vocab_size, seed, wishes):
    dice = np.random.default_rng(seed)
    rows = [row(kind, vocab_size, dice) for _ in wishes]
    fallen = np.where(dice.random(len(wishes)) < 0.2, dice.choice(DICE), dice.random(len(wishes)))
    before = [each.copy() for each in rows]
    drawn = draw(MAKERS[name](), rows, wishes, fallen)
    assert drawn == draw(NumpyDrawing(), rows, wishes, fallen)
    assert all(map(np.array_equal, rows, before))
    assert all(np.isfinite(each[token]) for each, token in zip(rows, drawn, strict=True))


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_dice_all_over_one_row_draw_the_same(name, kind):
    """A thousand dice, so that borders between tokens are met from both sides."""
    logits = row(kind, 2_000, np.random.default_rng(3))
    fallen = np.sort(np.random.default_rng(4).random(1_000))
    for wish in (DrawParams(), DrawParams(top_p=0.8), DrawParams(top_k=300, min_p=1e-3)):
        rows, wishes = [logits] * 1_000, [wish] * 1_000
        drawn = draw(MAKERS[name](), rows, wishes, fallen)
        assert drawn == draw(NumpyDrawing(), rows, wishes, fallen)
        assert drawn == sorted(drawn)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_vocabulary_is_drawn_from_alike(name, kind):
    dice = np.random.default_rng(7)
    wishes = [DrawParams(), DrawParams(top_p=0.9), DrawParams(top_k=50), DrawParams(top_k=2_000),
              DrawParams(temperature=0.7, top_k=900, top_p=0.8, min_p=0.01)]  # fmt: skip
    rows, fallen = [row(kind, 49_152, dice)] * len(wishes), dice.random(len(wishes))
    drawn = draw(MAKERS[name](), rows, wishes, fallen)
    assert drawn == draw(NumpyDrawing(), rows, wishes, fallen)


@pytest.mark.parametrize("name", NATIVE)
def test_rows_may_lie_anywhere(name):
    shelf = np.random.default_rng(5).standard_normal((20, 1_001)).astype(np.float32)
    rows, wishes = [shelf[i, i : i + 900] for i in range(20)], [DrawParams(top_p=0.9)] * 20
    fallen = np.random.default_rng(6).random(20)
    drawn = draw(MAKERS[name](), rows, wishes, fallen)
    assert drawn == draw(NumpyDrawing(), rows, wishes, fallen)


JUST_BELOW_1 = 1 - 2**-53


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize(
    ("wish", "count"),
    [(DrawParams(), 4096), (DrawParams(min_p=1.0), 4096), (DrawParams(top_p=0.5), 2048),
     (DrawParams(top_k=2048), 2048), (DrawParams(top_k=2048, top_p=0.25), 512)],
)  # fmt: skip
def test_where_a_token_begins_the_one_before_has_ended(name, wish, count):
    """Of equals each has as much of the die: here every border is a number that a die can show."""
    begins = np.unique([*range(0, count, 64), *range(0, count, 61), count - 1])
    rows, wishes = [np.zeros(4096, np.float32)] * len(begins), [wish] * len(begins)
    assert draw(MAKERS[name](), rows, wishes, begins / count) == begins.tolist()
    before = draw(MAKERS[name](), rows[1:], wishes[1:], begins[1:] / count - 2**-53)
    assert before == (begins[1:] - 1).tolist()
    assert draw(MAKERS[name](), rows[:1], [wish], np.array([JUST_BELOW_1])) == [count - 1]


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("top_k", [0, 2])
def test_top_p_of_half_a_unit_more_keeps_one_token_more(name, top_k):
    logits = np.array([0, -5] if top_k == 0 else [0, -5, -50], np.float32)
    unit = 2.0 ** (-50 if top_k == 0 else -49)
    total = 1 + np.rint(float(np.exp(np.float32(-5))) / unit) * unit
    for more, last in ((-0.5, 0), (0.5, 1)):
        wish = DrawParams(top_k=top_k, top_p=(1 + more * unit) / total)
        assert draw(MAKERS[name](), [logits], [wish], np.array([JUST_BELOW_1])) == [last]


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("seed", range(12))
def test_top_p_is_reached_exactly_wherever_the_search_for_it_stops(name, seed):
    """One unit more than the likely ones have takes the first of the unlikely, who come last."""
    logits = np.full(4096, -3, np.float32)
    logits[:2048] = np.sort(np.random.default_rng(seed).uniform(-1.9, 0, 2048))[::-1]
    logits[0] = 0
    masses = np.rint(np.exp(logits).astype(np.float64) * 2.0**39)
    wish = DrawParams(top_p=(masses[:2048].sum() + 1) / masses.sum())
    assert draw(MAKERS[name](), [logits], [wish], np.array([JUST_BELOW_1])) == [2048]


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_weight_is_right_to_its_last_bit(name, temperature, top_k):
    """min-p shows it: as much as the weight keeps the token, by one bit more does not."""
    below = -np.random.default_rng(1).uniform(0, 20, 1_000).astype(np.float32)
    weights = np.exp(below / np.float32(temperature))
    rows = [np.array([0, x, *[-90] * (top_k > 0)], np.float32) for x in below]
    for least, token in ((weights, 1), (np.nextafter(weights, np.float32(1)), 0)):
        wishes = [DrawParams(temperature, top_k=top_k, min_p=float(each)) for each in least]
        assert set(draw(MAKERS[name](), rows, wishes, np.full(1_000, JUST_BELOW_1))) == {token}


@pytest.mark.parametrize("name", DRAWINGS)
def test_top_p_may_take_very_unlikely_ones_if_they_are_many(name):
    logits = np.full(49_152, -13, np.float32)
    logits[40_000] = 0
    mass = np.exp(-13.0)
    for top_p in (0.85, 0.95, 0.99):
        wish = DrawParams(top_p=top_p)
        num_unlikely = int(np.ceil((top_p * (1 + 49_151 * mass) - 1) / mass))
        last = max(40_000, num_unlikely)  # the likely one lies among them
        assert draw(MAKERS[name](), [logits], [wish], np.array([JUST_BELOW_1])) == [last]


@pytest.mark.parametrize("name", DRAWINGS)
def test_nothing_to_draw_is_nothing_drawn(name):
    assert MAKERS[name]().draw([], [], np.zeros(0)) == []
