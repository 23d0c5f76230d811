from dataclasses import replace

import pytest

from services.executor.plan_check import BadPlan, LastStep, check_plan
from shared.messages import PREVIOUS, Move, Score
from shared.sampling import DrawParams
from tests.executor.plans import LIMITS, plan, report, row, sample

LAST = LastStep(step_id=4, drawing={1, 2})


def refusal(bad, last=None):
    """Why the plan is refused."""
    with pytest.raises(BadPlan) as refused:
        check_plan(bad, LIMITS, last)
    return str(refused.value)


PENALISING = DrawParams(temperature=0.0, presence_penalty=1.0)


def biased(*biases):
    return DrawParams(logit_bias=biases)


def penalised(**more):
    """A plan whose draw needs the history (65, 66, 67)."""
    asks = {"draw": PENALISING, "history": (65, 66, 67), "num_prompt": 2, **more}
    return plan(row((66, 67), 1, samples=[sample(**asks)]))


def scored(first_position, token_ids, num_top=2):
    """A plan whose row, at positions 3..5, scores tokens."""
    score = Score(first_position, token_ids, num_top)
    return plan(row((1, 2, 3), 3, (0, 1), samples=[], score=score))


GOOD = [
    plan(),
    plan(row()),
    plan(row(range(24), 0, range(6))),
    plan(row((65,), 23, range(6))),
    plan(row((65,), 0, (1, 2, 3))),  # a reservation: more blocks than tokens
    plan(row((0, 511), 3, (7, 0)), row((65,), 4, (2, 1), sequence_id=2)),
    plan(row((65,), 4, (0, 1)), row((65,), 4, (0, 2), sequence_id=2)),  # a shared first block
    plan(row(samples=[sample(1), sample(2, index=1), sample(3, index=2)])),
    plan(row(samples=[])),
    plan(row(samples=[sample(draw=DrawParams(0.5, 0.9, 40, 0.1), seed=-(2**63))])),
    plan(row(samples=[sample(banned_ids=(0, 256, 511))])),
    plan(row(samples=[sample(num_top=0), sample(2, num_top=20)])),
    plan(row(samples=[report(num_top=1), report(2, num_top=448), sample(3)])),
    plan(row(samples=[sample(draw=DrawParams(logit_bias=((3, -100.0), (511, 100.0))))])),
    plan(row(samples=[sample(draw=DrawParams(allowed_token_ids=(0, 511), bad_words=((3,),)))])),
    penalised(),
    penalised(num_prompt=3),
    penalised(draw=DrawParams(bad_words=((1, 2),))),
    scored(3, (2, 3, 4)),
    scored(5, (4,), 20),
    scored(4, (511,), 0),
    plan(copies=(Move(0, 1), Move(0, 2))),
    plan(swap_out=(Move(0, 1),), swap_in=(Move(0, 0),)),  # a swap-in after its own swap-out
    plan(swap_in=(Move(3, 5),), copies=(Move(5, 6),)),
    plan(row((65,), 4, (3, 5)), swap_in=(Move(0, 3), Move(1, 5))),  # back, and on in the same plan
    plan(row((65,), 4, (3, 6)), swap_in=(Move(1, 3), Move(0, 5)), copies=(Move(5, 6),)),
    plan(row((65,), 1, (6,)), row((65,), 1, (5,), 2), copies=(Move(5, 6),)),  # the last in place
    plan(swap_out=(Move(0, 1), Move(0, 2))),  # a block of two requests, once for each
    plan(row((65,), 0, (0,)), swap_out=(Move(0, 1),)),  # it leaves, and is written anew
    plan(swap_out=(Move(0, 1),), copies=(Move(2, 0),)),
]


@pytest.mark.parametrize("good", GOOD)
def test_what_keeps_the_laws_passes(good):
    check_plan(good, LIMITS, None)
    check_plan(good, LIMITS, LastStep(0))


BAD = [
    # places
    (plan(row(())), "no tokens"),
    (plan(row(first_position=-1)), "first position not in 0..23"),
    (plan(row((65,), 24, range(7))), "first position not in 0..23"),
    (plan(row((65,), 2**62, range(7))), "first position not in 0..23"),
    (plan(row((65,), 2**70)), "beyond 64 bits"),
    (plan(row((65, 66), 23, range(7))), "longer than max_model_len 24"),
    (plan(row((65,), 4, (0,))), "does not cover"),
    (plan(row((65,), 0, ())), "does not cover"),
    # tables
    (plan(row((65,), 0, (8,))), "not in the pool of 8 blocks"),
    (plan(row((65,), 0, (-1,))), "not in the pool of 8 blocks"),
    (plan(row((65,), 0, (0, 99))), "not in the pool of 8 blocks"),
    (plan(row((65,), 0, (2**65,))), "beyond 64 bits"),
    (plan(row(range(8), 0, (3, 3))), "in use twice"),
    (plan(row((65,), 4, (3, 3))), "in use twice"),
    (plan(row((65,), 4, (0, 1)), row((65,), 8, (0, 1, 2), sequence_id=2)), "in use twice"),
    # tokens
    (plan(row((512,))), "not in the vocabulary 0..511"),
    (plan(row((-2,))), "not in the vocabulary 0..511"),
    (plan(row((PREVIOUS, 65))), "PREVIOUS is not its last token"),
    (plan(row((PREVIOUS,))), "PREVIOUS means step 0, the last to run is none"),
    # sequences
    (plan(row(), row(block_table=(1,))), "a sequence has two rows: 1"),
    (plan(row(samples=[sample(5), sample(5)])), "a sequence has two samples: 5"),
    # samples
    (plan(row(samples=[sample(num_top=-1)])), "num_top -1 is not in 0..20"),
    (plan(row(samples=[sample(num_top=21)])), "num_top 21 is not in 0..20"),
    (plan(row(samples=[sample(draw=None)])), "draws nothing, and num_top None is not in 1..448"),
    (plan(row(samples=[sample(draw=None, num_top=0)])), "num_top 0 is not in 1..448"),
    (plan(row(samples=[sample(draw=None, num_top=449)])), "num_top 449 is not in 1..448"),
    (plan(row(samples=[report(index=1)])), "draws nothing, and index is for draws"),
    (plan(row(samples=[report(seed=1)])), "seed is for draws"),
    (plan(row(samples=[report(banned_ids=(1,))])), "banned_ids is for draws"),
    (plan(row(samples=[report(history=(65,), num_prompt=1)])), "history is for draws"),
    (plan(row(samples=[report(num_prompt=1)])), "num_prompt is for draws"),
    (plan(row(samples=[sample(seed=2**63)])), "seed 9223372036854775808 is beyond 64 bits"),
    (plan(row(samples=[sample(index=-1)])), "index -1"),
    (plan(row(samples=[sample(banned_ids=(512,))])), "banned id 512 is not in the vocabulary"),
    (plan(row(samples=[sample(draw=DrawParams(temperature=-1.0))])), "temperature"),
    (plan(row(samples=[sample(draw=DrawParams(temperature=float("nan")))])), "temperature"),
    (plan(row(samples=[sample(draw=DrawParams(top_p=0.0))])), "top_p"),
    (plan(row(samples=[sample(draw=DrawParams(top_k=-1))])), "top_k"),
    (plan(row(samples=[sample(draw=DrawParams(min_p=1.5))])), "min_p"),
    (plan(row(samples=[sample(draw=DrawParams(presence_penalty=2.5))])), "presence_penalty"),
    (plan(row(samples=[sample(draw=DrawParams(logit_bias=((512, 1.0),)))])), "logit_bias"),
    (plan(row(samples=[sample(draw=DrawParams(allowed_token_ids=(-1,)))])), "allowed_token_ids"),
    (plan(row(samples=[sample(draw=DrawParams(bad_words=((),)))])), "bad_words"),
    (plan(row(samples=[sample(draw=DrawParams(bad_words=((3,), (512,))))])), "bad_words: 512"),
    (plan(row(samples=[sample(draw=biased((3, 1.0), (3, 2.0)))])), "names a token id twice"),
    (plan(row(samples=[sample(draw=biased((3, 100.5)))])), "not from -100 to 100"),
    (plan(row(samples=[sample(draw=biased((3, float("nan"))))])), "not from -100 to 100"),
    (plan(row(samples=[sample(draw=biased((2**70, 1.0)))])), "logit_bias"),
    # histories
    (plan(row(samples=[sample(history=(65,))])), "history that its draw does not need"),
    (plan(row(samples=[sample(num_prompt=1)])), "history that its draw does not need"),
    (penalised(history=()), "history has 0 tokens before position 3"),
    (penalised(history=(66, 67)), "history has 2 tokens before position 3"),
    (penalised(history=(65, 66, 67, 68)), "history has 4 tokens before position 3"),
    (penalised(num_prompt=0), "num_prompt 0 is not in 1..3"),
    (penalised(num_prompt=4), "num_prompt 4 is not in 1..3"),
    (penalised(history=(512, 66, 67)), "history id 512 is not in the vocabulary 0..511"),
    (penalised(history=(PREVIOUS, 66, 67)), "history id -1 is not in the vocabulary 0..511"),
    (penalised(history=(2**64, 66, 67)), "a history id is beyond 64 bits"),
    (penalised(history=(65, 66, 66)), "history does not end with the row's tokens"),
    (penalised(history=(65, 66, PREVIOUS)), "history does not end with the row's tokens"),
    # scores
    (scored(3, ()), "it scores nothing"),
    (scored(2, (1,)), "positions 2..2 are not all in 3..5"),
    (scored(-1, (1,) * 9), "positions -1..7 are not all in 3..5"),
    (scored(5, (1, 2)), "positions 5..6 are not all in 3..5"),
    (scored(2**70, (1,)), "are not all in 3..5"),
    (scored(3, (PREVIOUS,)), "token id -1 is not in the vocabulary 0..511"),
    (scored(3, (512,)), "token id 512 is not in the vocabulary 0..511"),
    (scored(3, (1,), 21), "num_top 21 is not in 0..20"),
    (scored(3, (1,), -1), "num_top -1 is not in 0..20"),
    # moves and copies
    (plan(copies=(Move(0, 1), Move(1, 2))), "both source and destination: block 1"),
    (plan(copies=(Move(0, 0),)), "both source and destination: block 0"),
    (plan(copies=(Move(0, 2), Move(1, 2))), "destination twice: 2"),
    (plan(copies=(Move(0, 8),)), "destination 8 is not in the gpu pool of 8"),
    (plan(copies=(Move(-1, 0),)), "source -1 is not in the gpu pool of 8"),
    (plan(swap_out=(Move(0, 4),)), "destination 4 is not in the cpu pool of 4"),
    (plan(swap_in=(Move(4, 0),)), "source 4 is not in the cpu pool of 4"),
    (plan(swap_out=(Move(0, 1), Move(2, 1))), "destination twice: 1"),
    (plan(swap_in=(Move(0, 1), Move(2, 1))), "destination twice: 1"),
    (plan(swap_in=(Move(0, 1),), copies=(Move(2, 1),)), "destination twice: block 1"),
    (plan(row((65,), 0, (1,)), swap_in=(Move(0, 1), Move(0, 1))), "destination twice: 1"),
    (plan(swap_out=(Move(8, 0),)), "source 8 is not in the gpu pool of 8"),
    (plan(swap_in=(Move(0, 8),)), "destination 8 is not in the gpu pool of 8"),
    (plan(swap_in=(Move(2**70, 0),)), "is not in the cpu pool of 4"),
    (plan(swap_out=(Move(0, -1),)), "destination -1 is not in the cpu pool of 4"),
    (plan(swap_out=(Move(0, 1),), swap_in=(Move(1, 2),)), "destination is source: block 1"),
]


@pytest.mark.parametrize(("bad", "why"), BAD, ids=[why for _, why in BAD])
def test_what_breaks_a_law_is_refused_and_named(bad, why):
    assert why in refusal(bad)


def test_the_refusal_names_the_row():
    bad = plan(row(), row((65,), 5, (1,), sequence_id=77))
    assert refusal(bad).startswith("row of sequence 77: ")
    assert "sample of sequence 5" in refusal(plan(row(samples=[sample(5, num_top=-2)])))
    assert refusal(scored(3, ())).startswith("row of sequence 1, score: ")


def test_a_plan_scores_so_many_tokens_and_no_more():
    wide = replace(LIMITS, max_model_len=1000, num_gpu_blocks=250)

    def scoring(*counts):
        return plan(*[
            row((1,) * 200, 0, range(i * 50, i * 50 + 50), i, score=Score(0, (1,) * count, 0))
            for i, count in enumerate(counts)
        ])  # fmt: skip

    check_plan(scoring(200, 56), wide, None)
    with pytest.raises(BadPlan, match="257 tokens to score; a plan has 256 at most"):
        check_plan(scoring(200, 57), wide, None)


def test_a_history_says_previous_where_its_row_does():
    asks = sample(draw=PENALISING, history=(64, 65, PREVIOUS), num_prompt=2)
    check_plan(plan(row((PREVIOUS,), 2, samples=[asks]), step_id=5), LIMITS, LAST)
    knows = replace(asks, history=(64, 65, 66))
    bad = plan(row((PREVIOUS,), 2, samples=[knows]), step_id=5)
    assert "history does not end with the row's tokens" in refusal(bad, LAST)


@pytest.mark.parametrize("step_id", [4, 3, -1])
def test_steps_go_forward(step_id):
    assert refusal(plan(row(), step_id=step_id), LAST) == (
        f"step {step_id} comes after step 4; ids must grow"
    )


def test_previous_is_what_the_step_before_drew():
    check_plan(plan(row((PREVIOUS,)), step_id=5), LIMITS, LAST)
    check_plan(plan(row((64, PREVIOUS)), step_id=5), LIMITS, LAST)
    check_plan(plan(row((PREVIOUS,), sequence_id=2), step_id=5), LIMITS, LAST)  # it failed alone
    assert "drew nothing for it" in refusal(plan(row((PREVIOUS,), sequence_id=3), step_id=5), LAST)
    assert "the last to run is step 4" in refusal(plan(row((PREVIOUS,)), step_id=6), LAST)
