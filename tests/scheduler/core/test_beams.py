"""Beams in the scheduler: the texts they find, and the blocks they share, fork and free."""

from dataclasses import replace

import pytest

from services.scheduler.core.events import StepFinished
from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import CancelReason, Finished, GeneratedSequence, Tokens
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


# ------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least one token"),
        ({"n": 40}, "n", "beside 1 tokens that end a text at most 39"),
        ({"n": 4, "stop_token_ids": tuple(range(1, 38))}, "n", "at most 2 beams"),
        ({"n": 9}, "n", "at most 8 sequences run"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(build, params, field, words):
    house = build(640, 4, max_num_seqs=8 if params.get("n") == 9 else 256)
    beams(house, "A", **{"ignore_eos": False, **params})
    refused = house.stream("A").refused
    assert (refused.code, refused.param) == (ErrorCode.INVALID, field)
    assert words in refused.message


def test_as_many_beams_as_there_are_tokens_that_go_on(build):
    house = build(640, 4)
    beams(house, "A", n=39, max_tokens=3, ignore_eos=False)
    house.run()
    assert house.answers("A") == house.solos("A")


def test_a_search_counts_as_n_from_its_start(build):
    house = build(64, 4, max_num_seqs=5)
    beams(house, "A", n=4, max_tokens=3)
    house.submit("B", prompt=3, max_tokens=9, n=2)
    house.submit("C", prompt=3, max_tokens=9)
    house.step()
    assert [house.status(name) for name in "ABC"] == [
        Status.RUNNING, Status.WAITING, Status.WAITING,
    ]  # fmt: skip
    house.run()
    for name in "ABC":
        assert house.answers(name) == house.solos(name)


def test_the_worst_case_fits_exactly(build):
    """The prompt's full blocks once, then four tails: so many blocks are enough when alone."""
    house = build(2 + 4 * 2, 4, watermark=0.0)
    beams(house, "A", prompt=9, max_tokens=8, n=4)
    assert house.stream("A").refused is None
    house.run()
    assert house.answers("A") == house.solos("A")
    beams(house, "B", prompt=9, max_tokens=9, n=4)
    assert house.stream("B").refused.code is ErrorCode.NEVER_FITS


# ------------------------------------------------------------------ giving up


def test_an_answer_given_up_is_not_told_and_the_others_are(house):
    beams(house, "A", n=3)
    house.step(3)
    house.cancel("A", CancelReason.CLIENT_GONE, 1)
    house.cancel("A", CancelReason.STOP_STRING, 2)
    finished = house.replies(Finished)[0]
    assert (finished.sequence, finished.reason, finished.length) == (2, FinishReason.STOP, 0)
    house.run()
    assert house.answers("A") == [house.solo("A"), (), ()]
    assert house.finish("A", index=1) is None


@pytest.mark.parametrize("reason", list(CancelReason))
def test_when_no_answer_is_wanted_every_block_comes_back(build, reason):
    house = build(64, 4)
    beams(house, "A", n=3)
    house.step(3)
    for index in range(3):
        house.cancel("A", reason, index)
    house.step()
    assert (house.free, house.core.num_running) == (64, 0)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_r22_300_searches_and_streams_cut_short_leave_nothing(build, plans_in_flight):
    house = build(
        50, 4, num_cpu_blocks=60, watermark=0.0, preemption_mode="swap", enable_prefix_caching=True,
        plans_in_flight=plans_in_flight, max_num_seqs=64, laws_every=9,
    )  # fmt: skip
    names = [f"{at:03d}" for at in range(300)]
    for at, name in enumerate(names):
        if at % 2:
            beams(house, name, prompt=3 + at % 17, max_tokens=20, n=4)
        else:
            house.submit(name, prompt=3 + at % 17, max_tokens=20, ignore_eos=True)
    cut, swapped = set(), set()
    while house.in_flight:
        house.step()
        for name in names:
            if house.status(name) is Status.SWAPPED:
                swapped.add(name)
            request = house.core.book.get(name)
            if name not in cut and len(request.live_sequences[0].generated) >= 3:
                house.cancel(name)
                cut.add(name)
    assert len(cut) == 300
    assert any(int(name) % 2 for name in swapped)
    core = house.core
    assert (core.num_running, core.num_waiting, core.num_swapped) == (0, 0, 0)
    assert (house.free, core.cpu_usage().num_free) == (50, 60)


def test_a_row_error_of_one_beam_ends_the_request_and_no_other(house):
    house.submit("B", prompt=3, max_tokens=9, ignore_eos=True)
    beams(house, "A", n=3)
    house.step(3)
    failing = house.core.book.get("A").beams[1].sequence_id
    house.step(failing_rows={failing})
    assert finishes(house, "A") == [FinishReason.ERROR] * 3
    house.run()
    assert house.tokens("B") == house.solo("B")


def spoil(house, change):
    """Run the plan in flight, but say what `change` makes of its first report."""
    plan = house.in_flight.pop(0)
    result = house.executor.run(plan)
    first, *others = result.sampled
    changed = [] if change is None else [change(first)]
    result = replace(result, sampled=(*changed, *others))
    house.handle(StepFinished(house.later(), result))


def with_report(**changes):
    return lambda one: replace(one, logprobs=replace(one.logprobs, **changes))


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (None, "reported no likeliest tokens"),
        (lambda one: replace(one, logprobs=None), "reported no likeliest tokens"),
        (lambda one: replace(one, token_id=3), "drew a token for a beam"),
        (with_report(top_ids=(1, 2)), "2 likeliest tokens instead of 3"),
        (with_report(top_ids=(1, 2, 2)), "a likeliest token twice"),
        (with_report(top_ids=(1, 2, 99)), "beyond its 40"),
        (with_report(top=(float("nan"), -1.0, -1.0)), "are none"),
        (with_report(top=(0.5, -1.0, -1.0)), "are none"),
    ],
)
def test_a_report_that_is_none_ends_the_request(house, change, flaw):
    beams(house, "A", n=3)
    house.step(2)
    spoil(house, change)
    assert finishes(house, "A") == [FinishReason.ERROR] * 3
    assert flaw in house.stream("A").finished.error


# ------------------------------------------------------------------ streams


def test_a_resubmitted_search_begins_again_and_finds_the_same(build):
    house = build(64, 4)
    beams(house, "A", n=3)
    house.run()
    whole = house.answers("A")
    ended = tuple(GeneratedSequence(answer, FinishReason.LENGTH) for answer in whole[:2])
    beams(house, "B", prompt=house.submits["A"].prompt, n=3, extra={"generated": ended})
    assert house.status("B") is Status.RUNNING
    house.run()
    assert house.answers("B") == whole
    assert finishes(house, "B") == [FinishReason.LENGTH] * 3


def test_another_gateway_takes_a_search_over(house):
    beams(house, "A", n=3)
    house.step(3)
    house.attach("A", "h")
    assert [one.token_ids for one in house.stream("A", "h").attached.sequences] == [()] * 3
    house.run()
    assert house.answers("A", "h") == house.solos("A")
    house.attach("A", "g")
    assert house.answers("A") == house.solos("A")


def test_a_gateway_that_missed_the_answers_gets_them_again(house):
    gateway = house.gateways[b"g"]
    beams(house, "A", n=2)
    house.step()
    gateway.is_deaf = gateway.may_gap = True
    house.run()
    gateway.is_deaf = False
    house.beat("A")
    house.beat("A")
    assert house.answers("A") == house.solos("A")
    assert finishes(house, "A") == [FinishReason.LENGTH] * 2


def test_max_tokens_left_to_us_is_what_fits_for_all_beams(build):
    house = build(8, 4, max_model_len=200)
    beams(house, "A", max_tokens=None, n=3)
    assert house.stream("A").max_tokens == 8
    house.run()
    assert house.answers("A") == house.solos("A", 8)


def test_a_search_begins_again_where_less_fits_than_before(build):
    """How long texts may get decides which are the best, so nothing of the search is kept."""
    house = build(16, 4, max_model_len=200)
    beams(house, "A", max_tokens=None, n=2, early_stopping=EarlyStopping.NEVER)
    house.step(6)
    house.lose_executor()
    house.join(num_blocks=6)
    most = house.stream("A").max_tokens
    assert most < 20
    house.run()
    assert house.answers("A") == house.solos("A", most)
