"""Two thousand mixed requests through a pool of 64 blocks: nothing is lost, nothing goes astray."""

from dataclasses import replace
from random import Random

import pytest

from shared.errors import ErrorCode
from shared.messages import Costs, PreemptionMode
from shared.sampling import NO_DRAW, DrawParams, EarlyStopping, SamplingParams
from tests.scheduler.core.house import VOCAB, House, solo
from tests.scheduler.core.walker import FAMILIES, PENALTY

NUM_REQUESTS = 2_000
NUM_AT_ONCE = 40


def a_request(dice, number):
    """(prompt, sampling) of one of many kinds."""
    own = tuple((number * 5 + at * at) % (VOCAB - 1) + 1 for at in range(dice.randrange(1, 12)))
    family = dice.choice((None, *FAMILIES))
    prompt = own if family is None else (*family[: dice.randrange(4, 24)], *own[:3])
    sampling = SamplingParams(
        n=dice.choice((1, 1, 1, 1, 2, 4)), seed=dice.randrange(2**31),
        max_tokens=dice.randrange(1, 16), ignore_eos=dice.random() < 0.5,
        draw=dice.choice((DrawParams(), DrawParams(), PENALTY)),
        prompt_logprobs=dice.choice((None,) * 9 + (1,)),
    )  # fmt: skip
    if dice.random() < 0.15:
        sampling = as_beams(dice, sampling)
    return prompt, sampling


def as_beams(dice, sampling):
    """The same wish, to be searched with beams."""
    return replace(
        sampling, n=dice.choice((1, 2, 3, 4, 6)), draw=NO_DRAW, use_beam_search=True,
        length_penalty=dice.choice((-1.0, 0.0, 1.0, 2.0)),
        early_stopping=dice.choice(list(EarlyStopping)),
        stop_token_ids=dice.choice(((), (3, 8, 11, 20))), logprobs=dice.choice((None, 2)),
    )  # fmt: skip


def beams_that_gave_way(house, mode):
    """How many sequences of beam searches did in this way."""
    asked = {
        ask.sequence_id
        for plan in house.plans
        for row in plan.rows
        for ask in row.samples
        if ask.draw is None
    }
    told = [told for plan in house.plans for told in plan.preemptions]
    return sum(one.mode is mode and one.sequence_id in asked for one in told)


PINS = {"P": FAMILIES[0][:14], "Q": FAMILIES[1][:9]}  # 4 + 3 blocks, the last of each in part


def pin_or_unpin(house, dice):
    """One of the prefixes that families of prompts begin with comes or goes."""
    name = dice.choice(list(PINS))
    if name in house.pins():
        house.unpin(name)
    else:
        house.pin(name, PINS[name])


def deadline_and_priority(dice, policy):
    """What some requests say beside their wishes."""
    deadline_s = dice.choice((None,) * 7 + (0.02, 0.06, 60.0))
    priority = dice.choice((0, 0, 0, 2, 7, -1)) if policy == "priority" else 0
    return {"deadline_s": deadline_s, "priority": priority}


def is_over(house, name):
    """Whether each of its answers has ended."""
    return all(house.finish(name, index=index) for index in range(house.width(name)))


def is_late(house, name, answers):
    """Whether its deadline ended it; what it has is then how its answers begin."""
    ends = [house.stream(name, index=index).finished for index in range(len(answers))]
    if not any(end.code is ErrorCode.DEADLINE for end in ends):
        return False
    assert house.submits[name].deadline_s < 1
    for held, answer in zip(house.answers(name), answers, strict=True):
        assert held == answer[: len(held)], name
    return True


@pytest.mark.parametrize(
    ("mode", "plans_in_flight", "policy"),
    [("auto", 1, "fcfs"), ("auto", 2, "priority"), ("swap", 1, "priority"), ("swap", 2, "fcfs"),
     ("recompute", 1, "fcfs"), ("recompute", 2, "priority")],
)  # fmt: skip
def test_a_soak_ends_with_every_block_free_and_every_answer_right(mode, plans_in_flight, policy):
    house = House(
        64, 4, num_cpu_blocks=48, preemption_mode=mode, plans_in_flight=plans_in_flight,
        enable_prefix_caching=True, max_num_batched_tokens=48, laws_every=7,
        costs=Costs(block_bytes=64, copy_bytes_per_s=1e6, prefill_tokens_per_s=2.2e4),
        scheduling_policy=policy, enable_kv_bill=True,
    )  # fmt: skip
    dice = Random(f"{mode} {plans_in_flight}")
    waiting, live, shared = list(range(NUM_REQUESTS)), {}, 0
    cancelled, late = set(), set()
    for name, tokens in PINS.items():
        house.pin(name, tokens)
    while waiting or live:
        while waiting and len(live) < NUM_AT_ONCE:
            name = f"{waiting.pop(0):04d}"
            prompt, sampling = live[name] = a_request(dice, int(name))
            extra = deadline_and_priority(dice, policy)
            house.submit(name, prompt, sampling=sampling, extra=extra)
            assert house.stream(name).refused is None
        for _ in range(dice.randrange(1, 4) if len(house.in_flight) > 1 else 1):
            if house.in_flight:
                house.step()
        shared += house.core.usage().num_shared > 0
        if dice.random() < 0.1:
            house.tick(0.001)
        if dice.random() < 0.05:
            pin_or_unpin(house, dice)
        if dice.random() < 0.03:
            name = dice.choice(sorted(name for name in live if not is_over(house, name)))
            house.cancel(name)
            del live[name]
            cancelled.add(name)
        for name, (prompt, sampling) in list(live.items()):
            if is_over(house, name):
                answers = [solo(prompt, sampling, None, index)[0] for index in range(sampling.n)]
                if is_late(house, name, answers):
                    late.add(name)
                else:
                    assert house.answers(name) == answers, name
                    assert house.stream(name).prompt_logprobs == house.scores(name)
                house.done(name)
                del live[name]
    house.run()
    core, counters = house.core, house.core.counters
    assert counters.pin_hits > 100
    assert counters.pins_taken > 10
    for name in house.pins():
        house.unpin(name)
    assert (house.free, core.cpu_usage().num_free, len(core.book)) == (64, 48, 0)
    assert core.usage().num_free + core.usage().num_cached == 64
    assert min(shared, counters.prefix_cache_hits, counters.cow_copies) > 0
    assert min(core.prefix_evictions, len(cancelled)) > 0
    assert counters.deadlines_passed == len(late) > 10
    if mode != "recompute":
        assert min(counters.preemptions[PreemptionMode.SWAP], counters.swap_in_blocks) > 0
        assert beams_that_gave_way(house, PreemptionMode.SWAP) > 0
    if mode != "swap":
        assert counters.preemptions[PreemptionMode.RECOMPUTE] > 0
        assert beams_that_gave_way(house, PreemptionMode.RECOMPUTE) > 0
