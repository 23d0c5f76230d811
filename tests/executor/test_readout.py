"""What rows get out of their logits, through whole plans on the toy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from services.executor.model.toy import EOS, VOCAB_SIZE
from shared.errors import ErrorCode
from shared.messages import PREVIOUS, RowError, Score
from shared.sampling import DrawParams
from tests.executor.hands import Feverish, Hands
from tests.executor.plain_sampler import adjusted
from tests.executor.plain_toy import toy_logits
from tests.executor.plans import GREEDY, report, row, sample

TEXT = tuple(range(65, 77))


@pytest.fixture
def hands():
    return Hands()


def logits_after(*tokens):
    return toy_logits([(token, place) for place, token in enumerate(tokens)])


def log_softmax(*tokens):
    """The toy's log-probabilities after `tokens`."""
    return torch.from_numpy(logits_after(*tokens)).double().log_softmax(-1)


# --------------------------------------------------------------------------- draws


@pytest.mark.parametrize("token", [0, 66, EOS, VOCAB_SIZE - 1])
def test_a_bias_of_100_fetches_any_token(hands, token):
    draw = DrawParams(temperature=1.0, logit_bias=((token, 100.0),))
    assert hands.draws(row(TEXT[:3], samples=[sample(draw=draw)])) == {1: token}


def test_only_what_is_allowed_is_drawn(hands):
    draw = DrawParams(temperature=5.0, allowed_token_ids=(7, 300, 66))
    samples = [sample(i, draw, index=i) for i in range(40)]
    assert set(hands.draws(row(TEXT[:3], samples=samples)).values()) <= {7, 300, 66}


def test_penalised_each_of_ten_tokens_is_said_before_one_is_repeated(hands):
    few = tuple(range(80, 90))
    draw = DrawParams(
        temperature=0.0, allowed_token_ids=few, logit_bias=tuple((token, 50.0) for token in few),
        presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.2,
    )  # fmt: skip
    tokens = list(TEXT[:3])
    for step_id in range(1, 11):
        history = tuple(tokens)
        wish = sample(draw=draw, history=history, num_prompt=3)
        fresh = row(history, 0, (0, 1, 2, 3), samples=[wish])
        token = hands.draws(fresh, step_id=step_id)[1]
        assert token == int(adjusted(logits_after(*history), wish).argmax())
        tokens.append(token)
    assert sorted(tokens[3:]) == sorted(few)


PENALISED = [
    DrawParams(temperature=0.0, repetition_penalty=1.5),
    DrawParams(temperature=1.5, frequency_penalty=2.0, presence_penalty=1.0),
    DrawParams(top_p=0.9, repetition_penalty=0.5, bad_words=((65, 66), (70, 71, 72))),
    DrawParams(temperature=0.0, allowed_token_ids=(3, 4, 5), bad_words=((3, 3), (4, 3, 5))),
]


@pytest.mark.parametrize("draw", PENALISED)
def test_planning_ahead_with_previous_draws_what_plan_by_plan_draws(draw):
    """The history of a plan made ahead ends in PREVIOUS; the executor knows the token."""
    texts = []
    for ahead in (False, True):
        hands, tokens = Hands(), list(TEXT[:4])
        for step_id in range(1, 15):
            last = PREVIOUS if ahead and step_id > 1 else tokens[-1]
            history = (*tokens[:-1], last)
            wish = sample(draw=draw, history=history, num_prompt=4, seed=3)
            first = 0 if step_id == 1 else len(tokens) - 1
            ids = history[first:]
            made = hands.draws(row(ids, first, range(5), samples=[wish]), step_id=step_id)
            tokens.append(made[1])
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert len(set(texts[0][4:])) > 1


# --------------------------------------------------------------------------- log-probabilities


def test_log_probabilities_are_of_the_raw_distribution(hands):
    draw = DrawParams(
        temperature=0.5, top_k=1, logit_bias=((40, 90.0),), presence_penalty=2.0,
    )  # fmt: skip
    wish = sample(draw=draw, history=TEXT[:3], num_prompt=2, num_top=5, banned_ids=(41,))
    (made,) = hands.run(row(TEXT[:3], samples=[wish])).sampled
    wanted = log_softmax(*TEXT[:3])
    best = wanted.topk(5)
    assert made.token_id == 40
    assert made.logprobs.chosen == pytest.approx(float(wanted[40]), abs=1e-5)
    assert made.logprobs.rank == 1 + int((wanted > wanted[40]).sum())
    assert made.logprobs.top_ids == tuple(best.indices.tolist())
    assert made.logprobs.top == pytest.approx(best.values.tolist(), abs=1e-5)


def test_zero_likeliest_are_the_drawn_tokens_own_and_none_is_nothing(hands):
    samples = [sample(1, num_top=None), sample(2, num_top=0), sample(3, num_top=1)]
    told = [made.logprobs for made in hands.run(row(TEXT[:3], samples=samples)).sampled]
    assert told[0] is None
    assert (told[1].rank, told[1].top_ids, told[1].top) == (1, (), ())
    assert told[2].top == (told[2].chosen,) == (told[1].chosen,)


def test_a_row_is_told_the_same_bits_alone_and_in_company(hands):
    rng = np.random.default_rng(1)
    rows = []
    for i in range(8):
        ids = tuple(rng.integers(0, 512, 3).tolist())
        wish = sample(i, [*PENALISED, DrawParams(), GREEDY][i % 6], seed=i, num_top=20)
        if wish.draw.needs_history:
            wish = sample(i, wish.draw, seed=i, num_top=20, history=ids, num_prompt=1)
        score = Score(0, ids[1:], 20) if i % 2 else None
        rows.append(row(ids, 0, (i,), i, samples=[wish], score=score))
    together = hands.run(*rows)
    backwards = hands.run(*rows[::-1], step_id=2)
    alone = [hands.run(each, step_id=3 + i) for i, each in enumerate(rows)]
    assert together.sampled == backwards.sampled[::-1]
    assert together.sampled == tuple(made for result in alone for made in result.sampled)
    assert together.scored == backwards.scored[::-1]
    assert together.scored == tuple(made for result in alone for made in result.scored)


# --------------------------------------------------------------------------- reports


@pytest.mark.parametrize("num_top", [1, 2, 5, 21, 448])
def test_a_sample_that_draws_nothing_is_told_the_likeliest_tokens(hands, num_top):
    (made,) = hands.run(row(TEXT[:3], samples=[report(num_top=num_top)])).sampled
    wanted = log_softmax(*TEXT[:3])
    best = wanted.topk(num_top)
    assert made.token_id is None
    assert made.logprobs.top_ids == tuple(best.indices.tolist())
    assert made.logprobs.top == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (made.logprobs.chosen, made.logprobs.rank) == (made.logprobs.top[0], 1)


def test_reports_and_draws_share_plans_and_rows_and_keep_their_order(hands):
    wishes = [report(1), sample(2, num_top=2), report(3, num_top=4), sample(4)]
    shared = hands.run(row(TEXT[:3], samples=wishes), row(TEXT[:2], 0, (1,), 9)).sampled
    assert [made.sequence_id for made in shared] == [1, 2, 3, 4, 9]
    best = int(logits_after(*TEXT[:3]).argmax())
    assert [made.token_id for made in shared[:4]] == [None, best, None, best]
    assert shared[0].logprobs == shared[1].logprobs
    assert shared[2].logprobs.top[:2] == shared[0].logprobs.top
    rows = [row(TEXT[i : i + 3], 0, (i,), i, samples=[report(i)]) for i in range(8)]
    together = hands.run(*rows, step_id=2).sampled
    alone = [hands.run(each, step_id=3 + i).sampled[0] for i, each in enumerate(rows)]
    assert list(together) == alone


def test_nothing_goes_on_from_what_was_only_reported(hands):
    hands.run(row(TEXT[:3], samples=[report(1), sample(2)]))
    refused = hands.run(row((PREVIOUS,), 3, (0,)), step_id=2)
    assert "sequence 1: PREVIOUS, but step 1 drew nothing for it" in refused.message
    assert hands.draws(row((PREVIOUS,), 3, (0,), 2), step_id=2).keys() == {2}


def test_nonsense_ends_a_row_that_would_be_reported():
    hands = Hands(Feverish())
    rows = [row((65, 90), 0, (0,), 1, samples=[report(1)]),
            row((65, 66), 0, (1,), 2, samples=[report(2)])]  # fmt: skip
    result = hands.run(*rows)
    assert result.row_errors == (RowError(1, "its logits are not finite"),)
    assert [made.sequence_id for made in result.sampled] == [2]
    failed = hands.run(row((PREVIOUS,), 2, (0,)), step_id=2)
    assert "drew nothing for it" in failed.message


# --------------------------------------------------------------------------- scores


@pytest.mark.parametrize("cuts", [[0, 12], [0, 1, 12], [0, 5, 6, 12], list(range(13))])
def test_a_prompt_is_scored_the_same_in_chunks_and_in_one_piece(cuts):
    """Each chunk scores the tokens after its own; the last token of all has none after it."""
    hands, told = Hands(), []
    for step_id, (start, end) in enumerate(pairwise(cuts), 1):
        after = TEXT[start + 1 : end + 1]
        chunk = row(TEXT[start:end], start, (3, 1, 5), samples=[],
                    score=Score(start, after, 3) if after else None)  # fmt: skip
        result = hands.run(chunk, step_id=step_id)
        assert not result.row_errors
        for made in result.scored:
            assert (made.sequence_id, made.first_position) == (1, start)
            told += made.logprobs
    assert len(told) == 11
    for place, position in enumerate(told, 1):
        wanted = log_softmax(*TEXT[:place])
        assert position.chosen == pytest.approx(float(wanted[TEXT[place]]), abs=1e-5)
        assert position.rank == 1 + int((wanted > wanted[TEXT[place]]).sum())
        assert position.top_ids == tuple(wanted.topk(3).indices.tolist())


def test_rows_may_draw_and_score_in_one_plan(hands):
    result = hands.run(
        row(TEXT[:4], 0, (0,), 1, samples=[], score=Score(1, (90, 91), 0)),
        row(TEXT[:3], 0, (1,), 2),
        row(TEXT[:2], 0, (2,), 3, score=Score(0, (TEXT[1],), 1)),
    )
    assert [made.sequence_id for made in result.sampled] == [2, 3]
    assert [made.sequence_id for made in result.scored] == [1, 3]
    first, second = result.scored[0].logprobs
    assert first.chosen == pytest.approx(float(log_softmax(*TEXT[:2])[90]), abs=1e-5)
    assert second.chosen == pytest.approx(float(log_softmax(*TEXT[:3])[91]), abs=1e-5)
    assert result.sampled[0].token_id == int(logits_after(*TEXT[:3]).argmax())


# --------------------------------------------------------------------------- failures


def test_nonsense_in_a_scored_place_ends_its_row_alone():
    hands = Hands(Feverish())
    result = hands.run(
        row((65, 90, 67), 0, (0,), 1, score=Score(0, (90, 67), 2)),
        row((65, 66, 67), 0, (1,), 2, score=Score(0, (66, 67), 2)),
        row((65, 90, 67), 0, (2,), 3, score=Score(2, (68,), 2)),  # past the bad place
    )
    assert result.row_errors == (RowError(1, "its logits are not finite", ErrorCode.INTERNAL),)
    assert [made.sequence_id for made in result.sampled] == [2, 3]
    assert [made.sequence_id for made in result.scored] == [2, 3]


def test_a_row_that_cannot_draw_reports_no_score_either():
    hands = Hands(Feverish())
    result = hands.run(row((65, 90), 0, (0,), 1, score=Score(0, (90,), 2)))
    assert (result.sampled, result.scored) == ((), ())
    assert result.row_errors == (RowError(1, "its logits are not finite"),)


EVERYTHING = tuple((i,) for i in range(250))


@pytest.mark.parametrize(
    "wishes",
    [
        {"draw": DrawParams(allowed_token_ids=(70,)), "banned_ids": (70,)},
        {"draw": DrawParams(allowed_token_ids=(70, 71), bad_words=((70,), (71,)))},
        {"draw": DrawParams(temperature=0.0, allowed_token_ids=(70,), bad_words=((66, 70),)),
         "history": (65, 66), "num_prompt": 2},
        {"draw": DrawParams(bad_words=EVERYTHING, logit_bias=((500, 100.0),)),
         "banned_ids": tuple(range(250, 512))},
    ],
)  # fmt: skip
def test_a_draw_without_a_token_left_is_the_requests_fault_and_ends_it_alone(hands, wishes):
    result = hands.run(row((65, 66), samples=[sample(**wishes)]), row((65,), 0, (1,), 2))
    (error,) = result.row_errors
    assert (error.sequence_id, error.code) == (1, ErrorCode.INVALID)
    assert "no token is left to draw" in error.message
    assert [made.sequence_id for made in result.sampled] == [2]
    # What was planned ahead for it finds no token either.
    result = hands.run(row((PREVIOUS,), 2, (0,)), row((PREVIOUS,), 1, (1,), 2), step_id=2)
    assert [failed.sequence_id for failed in result.row_errors] == [1]
    assert [made.sequence_id for made in result.sampled] == [2]
