"""Random walks over everything that can happen: every law after every event, every answer right."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.messages import Costs
from shared.sampling import DrawParams, EarlyStopping
from tests.scheduler.core.walker import GATEWAYS, PENALTY, Walker, as_beams, random_walk

ANY = st.integers(0, 99)
GATEWAY = st.sampled_from(GATEWAYS)


class Walk(RuleBasedStateMachine):
    """Hypothesis chooses the house and the moves, and shrinks what breaks."""

    walker = None

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from((1, 2, 3, 4, 8)),
        max_num_seqs=st.sampled_from((1, 2, 3, 256)),
        max_num_batched_tokens=st.sampled_from((1, 2, 5, 16, 512)),
        watermark=st.sampled_from((0.0, 0.01, 0.3)),
        max_scored_tokens=st.sampled_from((1, 2, 5, 256)),
        max_num_queued_reqs=st.sampled_from((1, 2, 4096)),
        max_num_queued_tokens=st.sampled_from((5, 40, 9999)),
        num_cpu_blocks=st.sampled_from((0, 2, 9)),
        preemption_mode=st.sampled_from(("auto", "swap", "recompute")),
        enable_prefix_caching=st.booleans(),
        plans_in_flight=st.sampled_from((1, 2)),
        costs=st.sampled_from((Costs(64, 1e9, 1e3), Costs(64, 1e3, 1e6), Costs(64, 0.0, 0.0))),
        max_pinned_share=st.sampled_from((0.2, 0.5, 0.9)),
        join=st.booleans(),
        scheduling_policy=st.sampled_from(("fcfs", "priority")),
        enable_kv_bill=st.booleans(),
    )
    def build(self, **house):
        self.walker = Walker(max_model_len=40, stream_ttl_s=50.0, **house)

    @rule(
        prompt=st.integers(1, 18),
        max_tokens=st.sampled_from((None, 0, 1, 2, 5, 9, 20)),
        gateway=GATEWAY,
        seed=st.integers(0, 2),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from((0, 0, 3)),
        stops=st.sampled_from(((), (3,), (0, 7))),
        age_s=st.sampled_from((0.0, 0.0, 0.0015, 9.0)),
        logprobs=st.sampled_from((None, None, 0, 2)),
        prompt_logprobs=st.sampled_from((None, None, 0, 3)),
        draw=st.sampled_from((DrawParams(), PENALTY)),
        n=st.sampled_from((1, 1, 2, 3)),
        family=st.sampled_from((None, 0, 1)),
        tenant=st.sampled_from((0, 0, 1)),
        priority=st.sampled_from((0, 0, 1, -7)),
        deadline_s=st.sampled_from((None, None, 0.05, 4.0)),
        beams=st.none()
        | st.tuples(st.sampled_from((-1.0, 0.0, 2.0)), st.sampled_from(EarlyStopping)),
    )
    def submit(
        self, prompt, max_tokens, gateway, seed, ignore_eos, min_tokens, stops, age_s, logprobs,
        prompt_logprobs, draw, n, family, tenant, priority, deadline_s, beams,
    ):  # fmt: skip
        params = {
            "seed": seed,
            "ignore_eos": ignore_eos,
            "min_tokens": min_tokens,
            "stop_token_ids": stops,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "draw": draw,
            "n": n,
        }
        if beams is not None:
            params |= as_beams(*beams)
        if self.walker.settings["scheduling_policy"] == "fcfs":
            priority = 0
        self.walker.submit(
            prompt, max_tokens, gateway, params, age_s, family, tenant,
            priority=priority, deadline_s=deadline_s,
        )  # fmt: skip

    @rule(times=st.integers(1, 6))
    def step(self, times):
        self.walker.step(times)

    @rule(which=ANY)
    def row_error(self, which):
        self.walker.step_with_row_error(which)

    @rule(which=ANY, is_ours=st.booleans())
    def late_result(self, which, is_ours):
        self.walker.late_result(which, is_ours)

    @rule()
    def refuse_step(self):
        self.walker.refuse_step()

    @rule(which=ANY)
    def cancel(self, which):
        self.walker.cancel(which)

    @rule(which=ANY)
    def stop_string(self, which):
        self.walker.stop_string(which)

    @rule(which=ANY)
    def done(self, which):
        self.walker.done(which)

    @rule(which=ANY, gateway=GATEWAY)
    def attach(self, which, gateway):
        self.walker.attach(which, gateway)

    @rule(which=ANY)
    def detach(self, which):
        self.walker.detach(which)

    @rule(which=ANY)
    def submit_again(self, which):
        self.walker.submit_again(which)

    @rule(gateway=GATEWAY, times=st.integers(1, 3))
    def beat(self, gateway, times):
        for _ in range(times):
            self.walker.beat(gateway)

    @rule(gateway=GATEWAY)
    def deaf(self, gateway):
        self.walker.turn_deaf(gateway)

    @rule(gateway=GATEWAY)
    def hear(self, gateway):
        self.walker.hear_again(gateway)

    @rule(gateway=GATEWAY)
    def lose_gateway(self, gateway):
        self.walker.lose_gateway(gateway)

    @rule()
    def lose_executor(self):
        self.walker.lose_executor()

    @rule()
    def join(self):
        if self.walker.house.executor is None:
            self.walker.join()

    @rule(num_blocks=st.integers(3, 12))
    def join_another(self, num_blocks):
        self.walker.join(num_blocks)

    @rule()
    def restart(self):
        self.walker.restart()

    @rule(
        num_tokens=st.integers(1, 14),
        gateway=GATEWAY,
        family=st.sampled_from((0, 1)),
        tenant=st.sampled_from((0, 0, 1)),
    )
    def pin(self, num_tokens, gateway, family, tenant):
        self.walker.pin(num_tokens, gateway, family, tenant)

    @rule(which=ANY, gateway=GATEWAY)
    def unpin(self, which, gateway):
        self.walker.unpin(which, gateway)

    @rule(seconds=st.sampled_from((0.1, 3.0, 200.0)))
    def tick(self, seconds):
        self.walker.tick(seconds)

    @invariant()
    def all_is_well(self):
        if self.walker is not None:
            self.walker.check()

    def teardown(self):
        if self.walker is not None:
            self.walker.end()


Walk.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=50,
)
TestWalk = Walk.TestCase


HOUSES = {
    "tiny": {
        "num_blocks": 6, "block_size": 4, "max_model_len": 40, "deadlines": (None, None, 0.05, 0.5),
    },
    "chunks": {
        "num_blocks": 9, "block_size": 4, "max_model_len": 60, "max_num_batched_tokens": 5,
        "max_num_seqs": 4, "max_scored_tokens": 3, "max_num_queued_reqs": 3,
    },
    "single places": {"num_blocks": 40, "block_size": 1, "max_model_len": 48, "watermark": 0.1},
    "all at once": {
        "num_blocks": 14, "block_size": 2, "max_model_len": 24, "widths": (1, 2, 3), "beams": 0.3,
        "num_cpu_blocks": 9, "preemption_mode": "swap", "enable_prefix_caching": True,
        "plans_in_flight": 2, "watermark": 0.0,
    },
    "recompute, two ahead": {
        "num_blocks": 8, "block_size": 3, "max_model_len": 24, "widths": (1, 2), "beams": 0.4,
        "preemption_mode": "recompute", "enable_prefix_caching": True, "plans_in_flight": 2,
        "max_num_batched_tokens": 7,
    },
    "cheapest": {
        "num_blocks": 9, "block_size": 4, "max_model_len": 40, "widths": (1, 4), "beams": 0.3,
        "num_cpu_blocks": 16, "costs": Costs(64, 1e6, 2e4), "watermark": 0.0,
    },
    "priorities": {
        "num_blocks": 9, "block_size": 4, "max_model_len": 40, "widths": (1, 1, 3), "beams": 0.1,
        "num_cpu_blocks": 8, "costs": Costs(64, 1e6, 2e4), "watermark": 0.0, "max_num_seqs": 5,
        "scheduling_policy": "priority", "priorities": (0, 1, 1, 5, -2),
        "deadlines": (None, None, 0.05, 0.5), "enable_prefix_caching": True, "plans_in_flight": 2,
        "max_num_batched_tokens": 9, "enable_kv_bill": True,
    },
    "priorities, swap": {
        "num_blocks": 8, "block_size": 3, "max_model_len": 24, "widths": (1, 2), "beams": 0.4,
        "num_cpu_blocks": 20, "preemption_mode": "swap", "watermark": 0.1, "max_num_seqs": 3,
        "scheduling_policy": "priority", "priorities": (2, 1, 0), "deadlines": (None, 0.3),
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(HOUSES))
def test_a_long_walk_in_which_everything_happens(name, seed):
    walker = random_walk(seed, 2_000, **HOUSES[name])
    walker.end()
    must = {
        "preemption", "step", "cancel", "stop string", "done", "attach", "submit again", "deaf",
        "row error", "executor lost", "late result", "scored", "only scored",
        "pinned", "unpinned", "detach", "back again", "gateway lost",
    }  # fmt: skip
    house = HOUSES[name]
    if house["num_blocks"] * house["block_size"] > 24:  # else few prefixes fit beside requests
        must.add("pin hit")
    if "max_num_queued_reqs" in house:
        must.add("queue_full")
    if "widths" in house:
        must.add("copy on write")
    if "beams" in house:
        must.add("beam")
        if "preemption_mode" in house:
            must.add(f"beam {house['preemption_mode']}")
    if "deadlines" in house:
        must.add("deadline")
    if house.get("enable_prefix_caching"):
        must |= {"hit", "eviction"}
    if "num_cpu_blocks" in house:
        must |= {"swap", "swap in"}
    if house.get("preemption_mode") == "recompute" or "costs" in house:
        must.add("recompute")
    assert must <= set(+walker.happened), f"never happened: {must - set(+walker.happened)}"


def test_a_search_that_was_told_whole_keeps_its_ends_at_another_scheduler():
    walker = Walker(num_blocks=12, block_size=4, max_model_len=40)
    params = {"n": 2, "ignore_eos": True, **as_beams(1.0, EarlyStopping.NO)}
    walker.submit(3, 5, "g", params)
    walker.step(20)
    answers = walker.house.answers("001")
    walker.restart()
    walker.stop_string(0)  # the search has begun again: here it ends with nothing
    walker.end()
    assert walker.house.answers("001") == answers
    assert all(answers)


def story_of_a_walk(seed):
    """A digest of every command of a walk."""
    history = random_walk(seed, 1_000, **HOUSES["chunks"]).house.history
    assert sum(map(len, history)) > 800
    return hashlib.sha256(repr(history).encode()).hexdigest()


def test_the_same_events_give_the_same_commands():
    assert story_of_a_walk(5) == story_of_a_walk(5)
    assert story_of_a_walk(5) != story_of_a_walk(6)


def test_the_same_events_give_the_same_commands_whatever_pythonhashseed():
    script = "from tests.scheduler.core.test_walk import story_of_a_walk as s; print(s(5))"
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "12345")
    }
    assert told == {story_of_a_walk(5)}
