"""How answers end by their tokens, and what their gateway is told of it."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.messages import Tokens, Usage
from shared.sampling import FinishReason, SamplingParams
from tests.scheduler.core.toys import EOS, VOCAB, solo


def a_prompt_that_stops(after_least=2, **params):
    """A prompt whose answer ends with eos, after at least so many tokens."""
    sampling = SamplingParams(max_tokens=60, **params)
    for first in range(1, VOCAB):
        for second in range(1, VOCAB):
            tokens, reason, _ = solo((first, second), sampling)
            if reason is FinishReason.STOP and len(tokens) > after_least:
                return (first, second), tokens
    raise AssertionError("no such prompt")


def test_eos_ends_the_answer_is_its_last_token_and_is_named(house):
    prompt, tokens = a_prompt_that_stops()
    house.submit("A", prompt=prompt, max_tokens=60)
    house.run()
    finished = house.stream("A").finished
    assert house.tokens("A") == tokens
    assert tokens[-1] == EOS
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, EOS)
    assert finished.length == len(tokens)
    assert finished.usage == Usage(prompt_tokens=2, completion_tokens=len(tokens))


def test_with_ignore_eos_eos_is_a_token_like_any_other(house):
    prompt, tokens = a_prompt_that_stops()
    house.submit("A", prompt=prompt, max_tokens=len(tokens) + 5, ignore_eos=True)
    house.run()
    assert house.tokens("A")[: len(tokens)] == tokens
    assert (house.finish("A"), len(house.tokens("A"))) == (FinishReason.LENGTH, len(tokens) + 5)
    assert house.stream("A").finished.stop_token_id is None


def test_a_stop_id_ends_the_answer_too_even_if_it_is_an_ignored_eos(house):
    prompt, tokens = a_prompt_that_stops()
    stop = tokens[1]
    house.submit("A", prompt=prompt, max_tokens=60, stop_token_ids=(stop,))
    house.submit("B", prompt=prompt, max_tokens=60, stop_token_ids=(EOS,), ignore_eos=True)
    house.run()
    assert house.tokens("A") == tokens[: tokens.index(stop) + 1]
    assert house.stream("A").finished.stop_token_id == stop
    assert house.tokens("B") == tokens
    assert house.stream("B").finished.stop_token_id == EOS


def test_before_min_tokens_whatever_would_end_it_is_banned(house):
    house.submit(
        "A", prompt=3, max_tokens=40, min_tokens=2, stop_token_ids=(9, 5, 9), seed=3,
    )  # fmt: skip
    banned = [house.plans[-1].rows[0].samples[0].banned_ids]
    for _ in range(2):
        house.step()
        banned.append(house.plans[-1].rows[0].samples[0].banned_ids)
    assert banned == [(0, 5, 9), (0, 5, 9), ()]
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_with_ignore_eos_eos_is_not_banned_either(house):
    house.submit("A", max_tokens=5, min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    assert house.plans[-1].rows[0].samples[0].banned_ids == (9,)


def test_min_tokens_that_no_stop_could_interrupt_are_all_generated(house):
    prompt, tokens = a_prompt_that_stops()
    house.submit("A", prompt=prompt, max_tokens=60, min_tokens=len(tokens) + 3)
    house.run()
    assert len(house.tokens("A")) > len(tokens) + 3 or house.finish("A") is FinishReason.LENGTH
    assert house.tokens("A") == house.solo("A")


def test_a_stop_token_at_the_very_limit_is_a_stop(house):
    prompt, tokens = a_prompt_that_stops()
    house.submit("A", prompt=prompt, max_tokens=len(tokens))
    house.run()
    assert house.finish("A") is FinishReason.STOP


def test_the_blocks_are_free_as_soon_as_the_answer_has_ended(house):
    house.submit("A", prompt=5, max_tokens=1)
    house.step()
    assert (house.free, house.status("A")) == (16, Status.FINISHED)
    assert house.core.counters.requests_finished[house.finish("A")] == 1


def test_one_message_of_tokens_per_gateway_and_step_and_ends_come_after(house):
    house.submit("A", prompt=2, max_tokens=2, ignore_eos=True, gateway="g")
    house.submit("B", prompt=2, max_tokens=2, ignore_eos=True, gateway="h")
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True, gateway="g")
    house.step(2)
    told = house.replies(Tokens)
    assert [[run.request_id for run in message.items] for message in told] == [["A", "C"], ["B"]]
    assert [[run.start for run in message.items] for message in told] == [[1, 0], [0]]
    kinds = [type(command).__name__ for command in house.commands]
    assert kinds[0] == "RunStep"  # the executor is what everybody waits for
    names = [type(command.message).__name__ for command in house.commands[1:]]
    assert names == ["Tokens", "Tokens", "Finished"]


@pytest.mark.parametrize("token_id", [None, -1, VOCAB])
def test_a_token_that_cannot_be_ends_that_request_alone(house, token_id):
    house.submit("A", prompt=2, max_tokens=3, ignore_eos=True)
    house.submit("B", prompt=2, max_tokens=3, ignore_eos=True)
    house.step()
    sequence_id = house.sequence("A").sequence_id
    run = house.executor.run

    def run_and_spoil(plan, failing_rows=()):
        result = run(plan, failing_rows)
        sampled = tuple(
            type(s)(s.sequence_id, token_id if s.sequence_id == sequence_id else s.token_id)
            for s in result.sampled
        )
        return type(result)(result.boot, result.step_id, sampled)

    house.executor.run = run_and_spoil
    house.step()
    house.executor.run = run
    finished = house.stream("A").finished
    assert finished.reason is FinishReason.ERROR
    assert "the executor drew" in finished.error
    house.run()
    assert house.tokens("B") == house.solo("B")
