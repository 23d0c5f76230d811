"""Log-probabilities of answers, histories of draws: kept, sent, sent again, restored."""

from dataclasses import replace

import pytest

from services.scheduler.core.events import StepFinished
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import (
    Attached,
    GeneratedSequence,
    PositionLogprobs,
    RowError,
    Sampled,
    StepResult,
)
from shared.sampling import DrawParams, FinishReason
from tests.scheduler.core.toys import VOCAB

PENALTY = DrawParams(frequency_penalty=0.3)


def told(house, name, gateway="g"):
    return tuple(house.stream(name, gateway).logprobs)


def answer(house, sampled=(), errors=(), scored=()):
    """Give the core a result of the plan in flight that says this."""
    plan = house.in_flight.pop(0)
    house.handle(
        StepFinished(house.later(), StepResult(plan.boot, plan.step_id, sampled, errors, scored))
    )


# ------------------------------------------------------------------ of the answer


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_token_comes_with_its_log_probability_and_the_likeliest(house, num_top):
    house.submit("A", max_tokens=6, ignore_eos=True, logprobs=num_top)
    assert house.plans[-1].rows[0].samples[0].num_top == num_top
    house.run()
    assert told(house, "A") == house.logprobs("A")
    assert [len(entry.top_ids) for entry in told(house, "A")] == [num_top] * 6


def test_who_does_not_ask_is_asked_nothing_for_and_told_nothing(house):
    house.submit("A", max_tokens=6, ignore_eos=True)
    assert house.plans[-1].rows[0].samples[0].num_top is None
    house.run()
    assert (told(house, "A"), house.sequence("A").logprobs) == ((), [])


def test_they_outlive_giving_way(build):
    house = build(num_blocks=4, block_size=4)
    for name in "AB":
        house.submit(name, prompt=6, max_tokens=9, ignore_eos=True, logprobs=2)
    house.run()
    assert house.core.counters.preemptions.total() > 0
    for name in "AB":
        assert told(house, name) == house.logprobs(name)


def test_they_outlive_the_executor(house):
    house.submit("A", max_tokens=8, ignore_eos=True, logprobs=2)
    house.step(3)
    house.lose_executor()
    house.join()
    house.run()
    assert told(house, "A") == house.logprobs("A")


def test_they_are_sent_again_with_the_tokens_that_were_lost(house):
    house.submit("A", max_tokens=8, ignore_eos=True, logprobs=1)
    house.step(2)
    gateway = house.gateways[b"g"]
    gateway.is_deaf = gateway.may_gap = True
    house.run()
    gateway.is_deaf = False
    house.beat("A")
    house.beat("A")
    assert house.tokens("A") == house.solo("A")
    assert told(house, "A") == house.logprobs("A")


def test_a_gateway_that_takes_over_gets_them_all(house):
    house.submit("A", max_tokens=8, ignore_eos=True, logprobs=1)
    house.step(3)
    house.attach("A", "h")
    assert house.replies(Attached)[0].sequences[0].logprobs == house.logprobs("A")[:3]
    house.run()
    assert told(house, "A", "h") == house.logprobs("A")


def test_they_come_back_with_a_resubmission_and_can_be_attached_to(build):
    first = build()
    first.submit("A", max_tokens=8, ignore_eos=True, logprobs=1)
    first.step(4)
    held = (GeneratedSequence(first.tokens("A"), logprobs=told(first, "A")),)
    second = build()
    second.submit(
        "A", max_tokens=8, ignore_eos=True, logprobs=1,
        extra={"generated": held, "resubmitted": True},
    )  # fmt: skip
    second.step(2)
    second.attach("A", "h")
    second.run()
    assert told(second, "A", "g") == first.logprobs("A")[:6]
    assert told(second, "A", "h") == first.logprobs("A")


ENTRY = PositionLogprobs(-1.0, 1)


@pytest.mark.parametrize(
    ("logprobs", "wanted"),
    [((), 0), ((ENTRY,), 0), ((ENTRY,) * 3, 0), ((ENTRY,), None), ((ENTRY,) * 2, None)],
)
def test_a_resubmission_with_other_than_one_for_each_token_is_refused(house, logprobs, wanted):
    held = (GeneratedSequence((3, 4), logprobs=logprobs),)
    house.submit("A", logprobs=wanted, extra={"generated": held, "resubmitted": True})
    refusal = house.stream("A").refused
    assert (refusal.code, refusal.param) == (ErrorCode.INVALID, "generated")


NAN = float("nan")
BEST = PositionLogprobs(-1.0, 1, (4, 5), (-1.0, -2.0))


@pytest.mark.parametrize(
    ("reported", "flaw"),
    [
        (None, "no log-probabilities"),
        (replace(BEST, chosen=NAN), "are none"),
        (replace(BEST, top=(-1.0, NAN)), "are none"),
        (replace(BEST, chosen=0.5), "are none"),
        (replace(BEST, top_ids=(4,), top=(-1.0,)), "1 likeliest tokens instead of 2"),
        (replace(BEST, top=(-1.0,)), "likeliest"),
        (replace(BEST, top_ids=(4, VOCAB)), f"beyond its {VOCAB}"),
        (replace(BEST, top_ids=(-1, 4)), f"beyond its {VOCAB}"),
        (replace(BEST, rank=0), "rank 0"),
    ],
)
def test_a_token_without_sound_log_probabilities_ends_that_request_alone(house, reported, flaw):
    house.submit("A", max_tokens=4, ignore_eos=True, logprobs=2)
    house.submit("B", max_tokens=4, ignore_eos=True)
    house.step()
    answer(
        house,
        tuple(
            Sampled(row.sequence_id, 7, reported if row.samples[0].num_top else None)
            for row in house.in_flight[0].rows
        ),
    )
    finished = house.stream("A").finished
    assert (finished.reason, finished.code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert flaw in finished.error
    assert (finished.length, len(told(house, "A"))) == (1, 1)
    assert house.status("B") is Status.RUNNING


def test_a_token_that_cannot_be_has_minus_infinity_and_that_is_sound(house):
    house.submit("A", max_tokens=1, logprobs=0)
    answer(house, (Sampled(house.in_flight[0].rows[0].sequence_id, 7,
                           PositionLogprobs(-float("inf"), 40)),))  # fmt: skip
    assert house.finish("A") is FinishReason.LENGTH


def test_as_many_likeliest_as_the_vocabulary_has_are_enough(build):
    house = build(join=False)
    house.join(vocab=8)
    house.submit("A", prompt=(1, 2), max_tokens=1, logprobs=20)
    whole = PositionLogprobs(-1.0, 1, tuple(range(8)), (-1.0,) * 8)
    answer(house, (Sampled(house.in_flight[0].rows[0].sequence_id, 7, whole),))
    assert house.finish("A") is FinishReason.LENGTH


# ------------------------------------------------------------------ histories


def test_a_draw_that_depends_on_what_was_said_is_given_it_prompt_first(house):
    house.submit("A", prompt=(4, 5, 6), max_tokens=4, ignore_eos=True, draw=PENALTY)
    asked = []
    while house.in_flight:
        asked.append(house.plans[-1].rows[0].samples[0])
        house.step()
    said = (4, 5, 6, *house.tokens("A"))
    assert [ask.history for ask in asked] == [said[: 3 + at] for at in range(4)]
    assert {ask.num_prompt for ask in asked} == {3}
    assert house.tokens("A") == house.solo("A")


@pytest.mark.parametrize(
    ("draw", "is_needed"),
    [(DrawParams(), False), (DrawParams(bad_words=((3,),)), False),
     (DrawParams(logit_bias=((3, 1.0),)), False), (DrawParams(bad_words=((3, 4),)), True),
     (DrawParams(presence_penalty=0.1), True), (DrawParams(repetition_penalty=1.1), True)],
)  # fmt: skip
def test_no_other_draw_carries_a_history(house, draw, is_needed):
    house.submit("A", prompt=(4, 5, 6), max_tokens=3, ignore_eos=True, draw=draw)
    house.step()
    ask = house.plans[-1].rows[0].samples[0]
    assert (bool(ask.history), ask.num_prompt) == (is_needed, 3 if is_needed else 0)


def test_a_history_is_whole_though_the_prompt_comes_in_chunks_or_again(build):
    house = build(num_blocks=5, block_size=4, max_num_batched_tokens=3)
    for name in "AB":
        house.submit(name, prompt=7, max_tokens=7, ignore_eos=True, draw=PENALTY, min_tokens=3)
    house.run()
    assert house.core.counters.preemptions.total() > 0
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ errors of a row


@pytest.mark.parametrize("code", [ErrorCode.INVALID, ErrorCode.INTERNAL])
def test_a_row_error_says_what_kind_of_thing_it_was(house, code):
    house.submit("A", max_tokens=4, ignore_eos=True)
    sequence_id = house.in_flight[0].rows[0].sequence_id
    answer(house, errors=(RowError(sequence_id, "nothing is left to draw", code),))
    finished = house.stream("A").finished
    assert (finished.reason, finished.error, finished.code) == (
        FinishReason.ERROR, "nothing is left to draw", code,
    )  # fmt: skip
