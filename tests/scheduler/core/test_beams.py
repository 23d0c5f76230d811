"""Beams in the scheduler: the texts they find, and the blocks they share, fork and free."""

import pytest

from shared.messages import Finished, Tokens
from shared.sampling import NO_DRAW, EarlyStopping, FinishReason
from tests.scheduler.core.toys import EOS


def beams(house, name, prompt=9, max_tokens=8, n=4, **params):
    params = {"ignore_eos": True, **params}
    return house.submit(
        name, prompt, max_tokens=max_tokens, n=n, use_beam_search=True, draw=NO_DRAW, **params
    )


def finishes(house, name):
    return [house.finish(name, index=index) for index in range(house.width(name))]


# ------------------------------------------------------------------ texts


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_answers_are_the_best_texts_best_first(build, width, max_tokens):
    house = build(64, 4)
    beams(house, "A", n=width, max_tokens=max_tokens)
    house.run()
    assert house.answers("A") == house.solos("A")
    assert len(set(house.answers("A"))) == width
    assert finishes(house, "A") == [FinishReason.LENGTH] * width


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("stops", [(), (3, 5, 8, 9), tuple(range(1, 13))])
def test_texts_that_stop_are_kept_and_the_search_ends_when_none_gets_better(
    build, early_stopping, length_penalty, stops
):
    house = build(64, 4, enable_prefix_caching=True)
    beams(
        house, "A", max_tokens=12, n=3, ignore_eos=False, stop_token_ids=stops, min_tokens=2,
        length_penalty=length_penalty, early_stopping=early_stopping,
    )  # fmt: skip
    house.run()
    assert house.answers("A") == house.solos("A")
    for index in range(3):
        finished = house.stream("A", index=index).finished
        last = house.tokens("A", index=index)[-1]
        if finished.reason is FinishReason.STOP:
            assert finished.stop_token_id == last
            assert last in (EOS, *stops)
        else:
            assert (finished.reason, finished.length) == (FinishReason.LENGTH, 12)
    if len(stops) > 9:
        assert FinishReason.STOP in finishes(house, "A")


def test_log_probabilities_and_scores_come_with_the_answers(build):
    house = build(64, 4, max_num_batched_tokens=6)
    beams(house, "A", logprobs=7, prompt_logprobs=1, n=2, stop_token_ids=(4, 7), max_tokens=6)
    house.run()
    assert house.answers("A") == house.solos("A")
    assert house.stream("A").prompt_logprobs == house.scores("A")
    assert tuple(house.stream("A").logprobs) == house.logprobs("A")


def test_nothing_is_told_before_the_end_and_then_every_answer_in_one_run(house):
    beams(house, "A", max_tokens=4, n=3)
    for _ in range(3):
        house.step()
        assert house.commands[1:] == []
    house.step()
    (tokens,) = house.replies(Tokens)
    assert [(run.sequence, run.start, len(run.token_ids)) for run in tokens.items] == [
        (0, 0, 4), (1, 0, 4), (2, 0, 4),
    ]  # fmt: skip
    assert [finished.sequence for finished in house.replies(Finished)] == [0, 1, 2]
    usage = house.stream("A", index=2).finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 12)
    counters = house.core.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (9, 12)


def test_beams_greedy_and_sampled_requests_share_a_plan(build):
    house = build(128, 4)
    beams(house, "A", n=4)
    beams(house, "B", prompt=5, n=2, length_penalty=0.0)
    house.submit("C", prompt=7, max_tokens=9)
    house.submit("D", prompt=6, max_tokens=9, n=3)
    house.step(2)
    assert len(house.plans[-1].rows) == 4 + 2 + 1 + 3
    house.run()
    for name in "ABCD":
        assert house.answers(name) == house.solos(name)
