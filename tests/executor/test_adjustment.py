"""Every adjustment against transformers' own logits processors, or the published formula."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.executor.adjustment import adjust, is_adjusted
from services.executor.numpy_drawing import kept
from shared.sampling import DrawParams
from tests.executor.plans import sample

VOCAB = 400
SEEDS = range(20)


def case(seed, length=30, vocab_size=VOCAB):
    """Random logits, and a history in which many tokens come several times."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab_size) * 4).astype(np.float32)
    return logits, tuple(rng.integers(0, vocab_size // 8, length).tolist()), rng


def adjusted(logits, history=(), num_prompt=0, banned_ids=(), **draw):
    """What is drawn from; the original stays as it is."""
    row = logits.copy()
    wish = sample(draw=DrawParams(**draw), history=history, num_prompt=num_prompt,
                  banned_ids=banned_ids)  # fmt: skip
    assert is_adjusted(wish)
    adjust(row, wish)
    return row


def processed(logits, history, *processors):
    """What transformers makes of it."""
    ids = torch.tensor([history], dtype=torch.int64)
    return LogitsProcessorList(processors)(ids, torch.tensor(logits[None]))[0].numpy()


def assert_same(ours, theirs):
    assert (np.isneginf(ours) == np.isneginf(theirs)).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def biases(pairs):
    return SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in pairs])


def only(ids):
    return PrefixConstrainedLogitsProcessor(lambda _batch, _sent: list(ids), num_beams=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("penalty", [0.1, 0.9, 1.3, 50.0])
def test_repetition_penalty(seed, penalty):
    logits, history, _ = case(seed)
    ours = adjusted(logits, history, num_prompt=11, repetition_penalty=penalty)
    assert_same(ours, processed(logits, history, RepetitionPenaltyLogitsProcessor(penalty)))
    assert (ours != logits).sum() == len(set(history))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (2.0, -2.0), (-1.1, 0.3)]
)
def test_frequency_and_presence_penalty_are_openais_formula(seed, frequency, presence):
    logits, history, _ = case(seed)
    ours = adjusted(
        logits, history, num_prompt=11, frequency_penalty=frequency, presence_penalty=presence
    )
    said = Counter(history[11:])
    theirs = [
        mu - said[j] * frequency - (1 if said[j] > 0 else 0) * presence
        for j, mu in enumerate(logits.tolist())
    ]
    assert max(said.values()) > 1
    assert_same(ours, np.array(theirs, np.float32))


def test_before_the_first_token_of_an_answer_only_repetition_counts():
    logits, history, _ = case(1)
    wishes = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert (adjusted(logits, history, num_prompt=30, **wishes) == logits).all()
    assert (adjusted(logits, history, 30, repetition_penalty=2.0) != logits).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_logit_bias(seed):
    logits, history, rng = case(seed)
    ids = rng.choice(VOCAB, 25, replace=False).tolist()
    pairs = tuple((token_id, float(rng.uniform(-100, 100))) for token_id in ids)
    ours = adjusted(logits, logit_bias=pairs)
    assert_same(ours, processed(logits, history, biases(pairs)))


@pytest.mark.parametrize("seed", SEEDS)
def test_bad_words_of_one_and_of_several_tokens(seed):
    logits, history, rng = case(seed)
    endings = [
        (*history[-3:], 5),
        (*history[-1:], 6),
        (*history[-2:], 7),
        (*history[-2:], 399),
        (*history[-7:], 8),
    ]
    others = [tuple(rng.integers(0, 50, n).tolist()) for n in (1, 1, 2, 3, 4, 9)]
    words = (*endings, (history[-2], 9), *others)
    ours = adjusted(logits, history, num_prompt=28, bad_words=words)
    theirs = processed(logits, history, NoBadWordsLogitsProcessor([list(w) for w in words]))
    assert_same(ours, theirs)
    assert np.isneginf(ours[[5, 6, 7, 399, 8]]).all()  # across prompt and answer
    assert np.isneginf(ours).sum() < 12


def test_a_bad_word_may_begin_with_the_history_itself_and_not_before_it():
    logits = np.zeros(9, np.float32)
    words = ((1, 2, 3), (0, 1, 2, 4))
    ours = adjusted(logits, (1, 2), num_prompt=1, bad_words=words)
    assert np.flatnonzero(np.isneginf(ours)).tolist() == [3]


@pytest.mark.parametrize("seed", SEEDS)
def test_allowed_token_ids(seed):
    logits, history, rng = case(seed)
    ids = tuple(rng.integers(0, VOCAB, 30).tolist())  # some of them twice
    assert_same(adjusted(logits, allowed_token_ids=ids), processed(logits, history, only(ids)))


@pytest.mark.parametrize("seed", SEEDS)
def test_banned_ids_are_suppressed_tokens_and_what_min_tokens_forbids(seed):
    logits, history, rng = case(seed)
    ids = tuple(rng.choice(VOCAB, 30, replace=False).tolist())
    ours = adjusted(logits, banned_ids=ids)
    assert_same(ours, processed(logits, history, SuppressTokensLogitsProcessor(list(ids))))
    until = MinNewTokensLengthLogitsProcessor(11, len(history) - 10, list(ids))
    assert_same(ours, processed(logits, history, until))


@pytest.mark.parametrize("top", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05},
                                 {"top_k": 30, "top_p": 0.9, "min_p": 0.02}], ids=str)  # fmt: skip
def test_all_together_in_their_order_leave_what_transformers_leaves(top):
    """The set that is kept after everything; a threshold may fall on an edge, hardly ever."""
    differing = 0
    for seed in range(60):
        logits, history, rng = case(seed)
        pairs = tuple((int(i), float(rng.uniform(-6, 6))) for i in rng.choice(VOCAB, 9, False))
        words = ((history[-1], 3), (9,), (*history[-4:], 20), (1, 2))
        allowed = tuple(rng.choice(VOCAB, 150, replace=False).tolist())
        banned = tuple(rng.choice(VOCAB, 5, replace=False).tolist())
        temperature = float(rng.uniform(0.3, 3))
        draw = DrawParams(
            temperature=temperature, repetition_penalty=1.4, logit_bias=pairs,
            allowed_token_ids=allowed, bad_words=words, **top,
        )  # fmt: skip
        row = logits.copy()
        adjust(row, sample(draw=draw, history=history, num_prompt=9, banned_ids=banned))
        rules = [
            biases(pairs), RepetitionPenaltyLogitsProcessor(1.4), only(allowed),
            NoBadWordsLogitsProcessor([list(word) for word in words]),
            SuppressTokensLogitsProcessor(list(banned)),
        ]  # fmt: skip
        assert_same(row, processed(logits, history, *rules))
        rules.append(TemperatureLogitsWarper(temperature))
        if "top_k" in top:
            rules.append(TopKLogitsWarper(top["top_k"]))
        if "top_p" in top:
            rules.append(TopPLogitsWarper(top["top_p"]))
        if "min_p" in top:
            rules.append(MinPLogitsWarper(top["min_p"]))
        theirs = processed(logits, history, *rules)
        ours = [i for i in kept(row, draw)[0].tolist() if np.isfinite(row[i])]
        weights = np.exp((row - row.max()) / temperature)
        may_be_drawn = set(np.flatnonzero(weights > 1e-12).tolist())  # half a unit is less
        odd = (set(ours) ^ set(np.flatnonzero(np.isfinite(theirs)).tolist())) & may_be_drawn
        assert len(odd) <= 1
        differing += len(odd)
    assert differing <= 1


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-39])
def test_a_penalty_near_zero_makes_no_nonsense(penalty):
    logits = np.array([2.0, 0.0, -3.0, 1.0], np.float32)
    row = adjusted(logits, (0, 1, 2), num_prompt=1, repetition_penalty=penalty)
    assert np.isfinite(row).all()
    assert row.argmax() == 0
    assert row[3] == 1


@pytest.mark.parametrize(("history", "lowered"), [((), 0), ((3,), 1), ((3, 3, 3), 1)])
def test_presence_counts_once(history, lowered):
    row = adjusted(np.ones(9, np.float32), history, 0, presence_penalty=1.0)
    assert row[3] == 1 - lowered


def test_what_asks_for_nothing_is_drawn_from_as_it_is():
    assert not is_adjusted(sample(draw=DrawParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1)))
    assert is_adjusted(sample(banned_ids=(1,)))
