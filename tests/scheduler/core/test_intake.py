"""The door: what is refused, with which words, and how many tokens the others may generate."""

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode, StartError
from shared.ids import Boot
from shared.messages import GeneratedSequence, Refused
from shared.sampling import FinishReason, SamplingParams
from tests.scheduler.core.toys import VOCAB


def refused(house, name="A"):
    """The refusal of a request of which nothing is left."""
    refusal = house.stream(name).refused
    assert refusal is not None, "it was not refused"
    assert house.status(name) is None
    assert house.plans == []
    assert house.free == house.num_blocks
    assert house.core.counters.requests_refused == {refusal.code: 1}
    return refusal


def test_an_empty_prompt_is_refused(house):
    house.submit("A", prompt=())
    assert (refused(house).code, refused(house).param) == (ErrorCode.INVALID, "prompt")


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31 - 1])
def test_a_token_id_outside_the_vocabulary_is_refused_by_name(house, token_id):
    house.submit("A", prompt=(1, token_id, 2))
    assert refused(house).param == "prompt"
    assert f"token id {token_id} is not in the vocabulary (0..{VOCAB - 1})" in (
        refused(house).message
    )


def test_r20_a_prompt_beyond_the_model_names_both_numbers(build):
    house = build(2048, 16, max_model_len=16_384)
    house.submit("A", prompt=(1,) * 122_946, max_tokens=16)
    assert (refused(house).code, refused(house).param) == (ErrorCode.CONTEXT_LENGTH, "prompt")
    assert "122946" in refused(house).message
    assert "16384" in refused(house).message


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_more_min_tokens_than_can_be_is_refused(build, max_tokens):
    house = build(64, 4, max_model_len=32)
    house.submit("A", prompt=20, max_tokens=max_tokens, min_tokens=13)
    assert refused(house).param == "min_tokens"
    assert "12" in refused(house).message


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_taken"),
    [(20, 12, True), (20, 13, False), (31, 1, True), (31, None, True), (32, None, False),
     (32, 0, True), (33, 0, False), (31, 0, True), (32, 1, False), (33, 1, False)],
)  # fmt: skip
def test_prompt_and_answer_fit_in_max_model_len_together(build, prompt, max_tokens, is_taken):
    house = build(64, 4, max_model_len=32)
    house.submit("A", prompt=prompt, max_tokens=max_tokens)
    if is_taken:
        assert house.stream("A").max_tokens == (32 - prompt if max_tokens is None else max_tokens)
        house.run()
    else:
        assert refused(house).code == ErrorCode.CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "need"),
    [(13, 4, None), (13, 5, 5), (16, 1, None), (16, 2, 5), (17, 1, 5), (17, None, 5), (40, 9, 12)],
)
def test_what_the_whole_pool_cannot_hold_is_refused_with_both_numbers(
    build, prompt, max_tokens, need
):
    """Four blocks of four; the last token sampled needs no place."""
    house = build(4, 4)
    house.submit("A", prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    if need is None:
        house.run()
        assert house.tokens("A") == house.solo("A")
        return
    assert refused(house).code == ErrorCode.NEVER_FITS
    assert f"needs {need} blocks of 4 tokens; the KV pool has 4" in refused(house).message


@pytest.mark.parametrize(("prompt", "most"), [(1, 16), (13, 4), (16, 1)])
def test_a_defaulted_max_tokens_is_lowered_to_what_the_pool_holds(build, prompt, most):
    house = build(4, 4)
    house.submit("A", prompt=prompt, max_tokens=None, ignore_eos=True)
    assert house.stream("A").max_tokens == most
    house.run()
    assert house.tokens("A") == house.solo("A", most)
    assert house.finish("A") is FinishReason.LENGTH


def test_a_defaulted_max_tokens_is_the_rest_of_the_context_when_the_pool_is_large(build):
    house = build(64, 4, max_model_len=20)
    house.submit("A", prompt=5, max_tokens=None, ignore_eos=True)
    assert house.stream("A").max_tokens == 15


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 0}, "n"), ({"n": 129}, "n"), ({"logprobs": 21}, "logprobs"),
     ({"min_tokens": 9, "max_tokens": 8},
     "min_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"stop_token_ids": (VOCAB,)},
     "stop_token_ids"), ({"use_beam_search": True}, "temperature"),
     ({"length_penalty": 2.0}, "length_penalty")],
)  # fmt: skip
def test_sampling_is_checked_and_the_field_is_named(house, params, field):
    house.submit("A", sampling=SamplingParams(**params))
    assert refused(house).param == field


@pytest.mark.parametrize("age_s", [-1.0, float("nan"), float("inf")])
def test_an_age_that_is_no_age_is_refused(house, age_s):
    house.submit("A", age_s=age_s)
    assert refused(house).param == "age_s"


def test_what_was_generated_must_be_of_the_vocabulary_and_of_n_sequences(house):
    house.submit("A", generated=(1, VOCAB))
    assert refused(house).param == "generated"
    house.core.counters.requests_refused.clear()
    house.submit("B", extra={"generated": (GeneratedSequence((1,)), GeneratedSequence((2,)))})
    assert refused(house, "B").param == "generated"


def test_max_tokens_0_ends_at_once_without_a_block(house):
    house.submit("A", prompt=5, max_tokens=0)
    assert house.stream("A").max_tokens == 0
    assert (house.finish("A"), house.tokens("A")) == (FinishReason.LENGTH, ())
    assert house.plans == []
    assert house.stream("A").finished.usage.completion_tokens == 0
    assert house.stream("A").finished.usage.prompt_tokens == 5


def test_before_a_model_is_known_requests_wait_and_then_are_checked_in_their_order(build):
    house = build(4, 4, join=False)
    house.submit("A", prompt=5, max_tokens=3)
    house.submit("B", prompt=50, max_tokens=3)
    house.submit("C", prompt=5, max_tokens=3)
    assert (house.core.num_waiting, house.commands) == (3, [])
    house.join()
    assert house.stream("B").refused.code == ErrorCode.NEVER_FITS
    assert [house.status(name) for name in "ABC"] == [Status.RUNNING, None, Status.RUNNING]
    house.run()
    for name in "AC":
        assert house.tokens(name) == house.solo(name)


def test_a_request_cancelled_before_any_model_is_known_is_forgotten(build):
    house = build(join=False)
    house.submit("A")
    house.submit("B", gateway="h")
    house.cancel("B", gateway="g")  # not its own
    house.cancel("A")
    assert house.core.num_waiting == 1
    house.done("B", gateway="h")
    assert house.core.num_waiting == 0
    house.join()
    assert house.plans == []


def test_a_gateway_lost_before_any_model_is_known_takes_its_requests_along(build):
    house = build(join=False)
    house.submit("A", gateway="g")
    house.submit("B", gateway="h", max_tokens=2)
    house.lose_gateway("g")
    house.join()
    assert (house.status("A"), house.status("B")) == (None, Status.RUNNING)


def test_heartbeats_before_any_model_is_known_refuse_nobody(build):
    house = build(join=False)
    house.submit("A")
    house.beat("A")
    assert house.replies(Refused) == []
    house.attach("A", "h")
    assert house.stream("A", "h").refused.retry_after_s is not None


def test_a_stop_string_found_before_any_model_is_known_is_answered_once_it_is(build):
    house = build(join=False)
    house.submit("A", generated=(3, 4))
    house.submit("B")
    house.stop_string("A")
    house.stop_string("B")
    house.join()
    assert (house.finish("A"), house.tokens("A")) == (FinishReason.STOP, (3, 4))
    assert (house.finish("B"), house.tokens("B")) == (FinishReason.STOP, ())
    assert house.plans == []


@pytest.mark.parametrize(
    ("setting", "flag"),
    [({"max_num_seqs": 0}, "--max-num-seqs"), ({"watermark": 1.0}, "--watermark"),
     ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
     ({"plans_in_flight": 3}, "--plans-in-flight"),
     ({"preemption_mode": "never"}, "--preemption-mode"), ({"stream_ttl_s": 0.0}, "--stream-ttl"),
     ({"scheduling_policy": "lifo"}, "--scheduling-policy"),
     ({"max_pinned_share": 1.0}, "--max-pinned-share")],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_by_its_flag(setting, flag):
    with pytest.raises(StartError, match=flag):
        SchedulerConfig(Boot(1), **setting)
