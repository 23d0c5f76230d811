"""Giving way by swap, by recompute, or by what is cheaper; and that nobody gives way in circles."""

from dataclasses import replace

import pytest

from services.scheduler.core.costs import Estimate, MachineCosts
from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.line import Line
from services.scheduler.core.policies.order import Fcfs
from services.scheduler.core.policies.preemption import Auto, LatestFirst, Recompute, Swap
from shared.geometry import blocks_in
from shared.ids import Boot
from shared.messages import Costs, Move, PreemptionMode, StepPlan, StepTimings
from shared.sampling import FinishReason

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
CHEAP_SWAP = Costs(block_bytes=1_000, copy_bytes_per_s=1e9, prefill_tokens_per_s=100.0)
CHEAP_RECOMPUTE = Costs(block_bytes=1_000, copy_bytes_per_s=1e3, prefill_tokens_per_s=1e6)


@pytest.fixture
def swapping(build):
    """A house whose victims are swapped out."""

    def build_swapping(num_blocks, block_size=4, num_cpu_blocks=64, **settings):
        return build(
            num_blocks, block_size, num_cpu_blocks=num_cpu_blocks,
            **{"preemption_mode": "swap", **settings},
        )  # fmt: skip

    return build_swapping


def two_that_do_not_fit(house, **params):
    for name in "AB":
        house.submit(name, prompt=34, max_tokens=35, ignore_eos=True, **params)


# ------------------------------------------------------------------ the moves


def test_a_victim_moves_out_and_comes_back_with_its_next_row(swapping):
    house = swapping(4)
    house.submit("A", prompt=6, max_tokens=5, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    house.step(2)
    assert house.table("B") == ((2, 4), (3, 4))
    house.step()  # A needs a third block
    out = house.plans[-1]
    assert (out.swap_out, out.rows) == ((Move(2, 0), Move(3, 1)), ())
    assert [(p.sequence_id, p.mode) for p in out.preemptions] == [
        (house.sequence("B").sequence_id, SWAP)
    ]
    assert (house.status("B"), house.sequence("B").table) == (Status.SWAPPED, None)
    assert (house.core.num_swapped, house.core.cpu_usage().num_used) == (1, 2)
    while house.status("B") is Status.SWAPPED:
        house.step()
    back = house.plans[-1]
    assert {move.source for move in back.swap_in} == {0, 1}
    assert set(house.rows()) == {"B"}
    assert house.rows()["B"] == (8, 1, 1)  # nothing is computed again
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)
    counters = house.core.counters
    assert (counters.swap_out_blocks, counters.swap_in_blocks) == (2, 2)
    assert counters.preemptions == {SWAP: 1}
    assert counters.computed_tokens == 6 + 4 + 7 + 4
    assert house.core.cpu_usage().num_free == 64


def test_blocks_that_move_out_are_free_for_later_plans_only(swapping):
    house = swapping(4)
    house.submit("A", prompt=6, max_tokens=5, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    house.step(3)
    assert house.plans[-1].swap_out
    assert house.core.steps.holdings.allocator.pool.settling_blocks
    house.step()
    assert house.table("A")[2][0] in (2, 3)


def test_others_go_on_in_the_step_that_moves_a_victim_out(swapping):
    house = swapping(6)
    house.submit("A", prompt=6, max_tokens=12, ignore_eos=True)
    house.submit("B", prompt=4, max_tokens=12, ignore_eos=True)
    house.submit("C", prompt=7, max_tokens=9, ignore_eos=True)
    while not house.in_flight[-1].swap_out:
        house.step()
    assert set(house.rows()) == {"B"}  # A asked, C moves out, B needed nothing
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_r2_two_requests_that_fit_alone_but_not_together(build, mode, plans_in_flight):
    house = build(
        7, 16, preemption_mode=mode, num_cpu_blocks=8, plans_in_flight=plans_in_flight,
        costs=CHEAP_SWAP,
    )  # fmt: skip
    two_that_do_not_fit(house)
    house.run()
    for name in "AB":
        assert (house.tokens(name), len(house.tokens(name))) == (house.solo(name), 35)
    counters = house.core.counters
    assert counters.preemptions[RECOMPUTE if mode == "recompute" else SWAP] >= 1
    assert (house.free, house.core.cpu_usage().num_free) == (7, 8)


def test_a_shared_block_moves_once_a_request_and_comes_back_shared(swapping):
    house = swapping(12)
    house.submit("A", prompt=9, max_tokens=12, ignore_eos=True)
    house.submit("B", prompt=9, max_tokens=8, n=3, ignore_eos=True)
    house.step(3)
    blocks = {block for index in range(3) for block, _ in house.table("B", index)}
    while house.status("B") is not Status.SWAPPED:
        blocks = {block for index in range(3) for block, _ in house.table("B", index)}
        house.step()
    assert {move.source for move in house.plans[-1].swap_out} == blocks
    assert len(house.plans[-1].swap_out) == len(blocks)
    while house.status("B") is Status.SWAPPED:
        house.step()
    assert [house.ref_count(block) for block, _ in house.table("B")[:2]] == [3, 3]
    house.run()
    assert house.answers("B") == house.solos("B")
    assert house.tokens("A") == house.solo("A")


def test_other_owners_of_a_block_keep_it(swapping):
    house = swapping(8, enable_prefix_caching=True)
    prompt = tuple(range(1, 18))
    house.submit("A", prompt, max_tokens=14, ignore_eos=True)
    house.step()
    house.submit("B", (*prompt, 30), max_tokens=12, ignore_eos=True)
    while house.core.num_swapped == 0:
        shared = [block for block, _ in house.table("A") if house.ref_count(block) > 1]
        house.step()
    assert len(shared) == 4
    assert [block for block, _ in house.table("A")][:4] == shared
    assert {move.source for move in house.plans[-1].swap_out} >= set(shared)
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_swapped_ones_come_back_before_anybody_starts(swapping):
    house = swapping(4)
    house.submit("A", prompt=6, max_tokens=8, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    house.step(3)
    assert house.status("B") is Status.SWAPPED
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True, age_s=50.0)  # older, and fits
    while house.status("B") is Status.SWAPPED:
        assert house.status("C") is Status.WAITING
        house.step()
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def three_of_which_two_are_out(swapping, **settings):
    """A grows; C moves out for it, and then B."""
    house = swapping(6, **settings)
    house.submit("A", prompt=6, max_tokens=17, ignore_eos=True)
    for name in "BC":
        house.submit(name, prompt=7, max_tokens=12, ignore_eos=True)
    while house.core.num_swapped < 2:
        house.step()
    return house


def test_of_the_swapped_the_older_comes_back_first_though_it_went_last(swapping):
    house, back = three_of_which_two_are_out(swapping), []
    names = {house.sequence(name).sequence_id: name for name in "BC"}
    out = [names[gave.sequence_id] for plan in house.plans for gave in plan.preemptions]
    assert out == ["C", "B"]
    while len(back) < 2:
        house.step()
        back += [
            name for name in "BC" if name not in back and house.status(name) is not Status.SWAPPED
        ]
    assert back == ["B", "C"]
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


@pytest.mark.parametrize(("watermark", "first_back"), [(0.0, (2, 0)), (0.25, (1, 4))])
def test_who_comes_back_leaves_the_watermark_free_while_others_run(swapping, watermark, first_back):
    """B could come back beside A and take the last block; with a watermark it waits for A's end."""
    house, returned = swapping(8, watermark=watermark), []
    house.submit("A", prompt=6, max_tokens=16, ignore_eos=True)
    house.submit("C", prompt=3, max_tokens=8, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=10, ignore_eos=True)
    while house.in_flight:
        was_out = house.status("B") is Status.SWAPPED
        house.step()
        if was_out and house.status("B") is Status.RUNNING:
            returned.append((house.core.num_running, house.free))
    assert returned[0] == first_back
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ no room, no more need


def test_r1_no_room_to_swap_is_recompute_and_never_an_abort(swapping):
    """64 blocks, 2 for swapped ones; 20 requests of 8 answers each."""
    house = swapping(64, 16, num_cpu_blocks=2, max_num_seqs=64)
    names = [f"{at:02d}" for at in range(20)]
    for seed, name in enumerate(names):
        house.submit(name, prompt=9, max_tokens=64, n=8, seed=seed, ignore_eos=True)
    house.run()
    for name in names:
        assert house.answers(name) == house.solos(name)
        assert [house.finish(name, index=i) for i in range(8)] == [FinishReason.LENGTH] * 8
    counters = house.core.counters
    assert counters.preemptions[RECOMPUTE] > 0
    assert counters.swap_fallbacks > 0
    assert (house.free, house.core.cpu_usage().num_free) == (64, 2)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_swapped_request_that_is_cancelled_frees_its_blocks_at_the_result(
    swapping, plans_in_flight
):
    house = swapping(4, plans_in_flight=plans_in_flight)
    house.submit("A", prompt=6, max_tokens=8, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=8, ignore_eos=True)
    while house.core.num_swapped == 0:
        house.step()
    assert house.core.cpu_usage().num_used == 2
    house.cancel("B")
    assert house.core.cpu_usage().num_used == 2  # the plan in flight writes there
    while any(plan.swap_out for plan in house.in_flight):
        house.step()
    assert (house.core.cpu_usage().num_used, house.core.num_swapped) == (0, 0)
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_a_stop_string_ends_a_swapped_answer_where_it_is(swapping):
    house = swapping(4)
    house.submit("A", prompt=6, max_tokens=8, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=8, ignore_eos=True)
    while house.core.num_swapped == 0:
        house.step()
    held = house.tokens("B")
    house.stop_string("B")
    assert (house.finish("B"), house.tokens("B")) == (FinishReason.STOP, held)
    house.run()


def test_a_lost_executor_takes_the_swapped_blocks_with_it(swapping):
    house = swapping(4)
    house.submit("A", prompt=6, max_tokens=8, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=8, ignore_eos=True)
    while house.core.num_swapped == 0:
        house.step()
    house.lose_executor()
    assert (house.core.num_swapped, house.core.num_waiting) == (0, 2)
    house.join()
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_who_was_moved_out_by_a_refused_plan_computes_all_again(swapping):
    house = swapping(6)
    house.submit("A", prompt=6, max_tokens=12, ignore_eos=True)
    house.submit("B", prompt=4, max_tokens=12, ignore_eos=True)
    house.submit("C", prompt=7, max_tokens=9, ignore_eos=True)
    while not house.in_flight[-1].swap_out:
        house.step()
    house.refuse_step()  # B had the only row
    assert [house.finish(name) for name in "ABC"] == [None, FinishReason.ERROR, None]
    assert house.status("C") is not Status.SWAPPED
    assert house.core.cpu_usage().num_used == 0
    house.run()
    for name in "AC":
        assert house.tokens(name) == house.solo(name)


def test_who_was_moved_in_by_a_refused_plan_computes_all_again_even_without_a_row_in_it(swapping):
    house = three_of_which_two_are_out(swapping)
    while not house.in_flight[-1].swap_in:
        house.step()
    sent = house.core.steps.in_flight[-1]
    assert [request.request_id for request in sent.swapped_in] == ["B"]
    for row in sent.rows.values():
        for sequence in row.draws:
            sequence.ahead -= 1
    sent.rows.clear()  # as if nothing had been granted to it
    before = house.core.counters.computed_tokens
    house.refuse_step()
    assert house.sequence("B").num_computed <= house.core.counters.computed_tokens - before
    house.run()
    assert house.tokens("B") == house.solo("B")


# ------------------------------------------------------------------ no thrash


class Growing:
    """Watches that whoever comes back has more tokens when it gives way again."""

    def __init__(self, house):
        self.house, self.at_last, self.last_step = house, {}, 0

    def look(self):
        if self.house.plans[-1].step_id == self.last_step:
            return
        self.last_step = self.house.plans[-1].step_id
        for request in self.house.core.book:
            told = {p.sequence_id for p in self.house.plans[-1].preemptions}
            for sequence in request.sequences:
                if sequence.sequence_id in told:
                    num_tokens = sum(len(s.generated) + s.ahead for s in request.sequences)
                    assert num_tokens > self.at_last.get(request.request_id, -1)
                    self.at_last[request.request_id] = num_tokens
                    break


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_tiny_pools_end_and_nobody_gives_way_twice_without_a_new_token(
    build, mode, plans_in_flight, n, cache
):
    house = build(
        6 if n == 1 else 9, 2, preemption_mode=mode, num_cpu_blocks=12,
        plans_in_flight=plans_in_flight, enable_prefix_caching=cache, max_num_batched_tokens=4,
        watermark=0.0,
    )  # fmt: skip
    for name in "ABCDEF":
        house.submit(name, prompt=3, max_tokens=6 if n == 2 else 8, n=n, ignore_eos=True)
    growing, most = Growing(house), 0
    while house.in_flight:
        house.step()
        growing.look()
        most += 1
        assert most < 2_000
    assert house.core.counters.preemptions[PreemptionMode(mode)] > 2
    for name in "ABCDEF":
        assert house.answers(name) == house.solos(name)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_blocks_of_who_came_back_are_kept_from_the_growth_of_others(build, mode):
    """B places what it knows in chunks; A, which is older and grows, may not eat what B needs."""
    num_blocks, *wishes = {
        "recompute": (10, (3, 16), (4, 7), (8, 6)),
        "swap": (12, (5, 16), (6, 5), (9, 6)),
    }[mode]
    house = build(
        num_blocks, 2, preemption_mode=mode, num_cpu_blocks=12, max_num_batched_tokens=3,
        watermark=0.0,
    )  # fmt: skip
    for name, (prompt, max_tokens) in zip("ACB", wishes, strict=True):
        house.submit(name, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    pool, to_come = house.core.steps.holdings.allocator.pool, []
    while house.in_flight:
        house.step()
        request = house.core.book.get("B")
        if request.status is Status.RUNNING and request.is_protected:
            sequence = house.sequence("B")
            to_come.append(blocks_in(sequence.num_tokens, 2) - len(sequence.table))
            assert to_come[-1] <= pool.num_available + pool.num_settling
    assert max(to_come) > 0, "it came back, and had not all its places at once"
    assert house.core.counters.preemptions[PreemptionMode(mode)] >= 1
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ what is cheaper


def test_auto_takes_what_is_cheaper_and_recompute_where_it_does_not_know():
    auto = Auto()
    assert auto.mode(Estimate(1.0, 2.0)) is SWAP
    assert auto.mode(Estimate(2.0, 1.0)) is RECOMPUTE
    for unknown in (Estimate(None, 1.0), Estimate(1.0, None), Estimate(None, None)):
        assert auto.mode(unknown) is RECOMPUTE
    assert Swap().mode(Estimate(2.0, 1.0)) is SWAP
    assert Recompute().mode(Estimate(1.0, 2.0)) is RECOMPUTE


@pytest.mark.parametrize(("costs", "mode"), [(CHEAP_SWAP, SWAP), (CHEAP_RECOMPUTE, RECOMPUTE)])
def test_two_sets_of_costs_flip_the_choice(build, costs, mode):
    house = build(7, 16, num_cpu_blocks=8, preemption_mode="auto", costs=costs)
    two_that_do_not_fit(house)
    house.run()
    counters = house.core.counters
    assert set(+counters.preemptions) == {mode}
    assert counters.preemption_estimated_s[mode] > 0
    assert house.tokens("B") == house.solo("B")


def test_an_estimate_is_of_two_moves_a_block_or_all_its_tokens(build):
    costs = Costs(block_bytes=100, copy_bytes_per_s=1_000.0, prefill_tokens_per_s=50.0)
    machine = MachineCosts(costs, Counters())
    assert machine.estimate(3, 40) == Estimate(2 * 3 * 100 / 1_000, 40 / 50)
    nothing = replace(costs, copy_bytes_per_s=0.0, prefill_tokens_per_s=0.0)
    unknown = MachineCosts(nothing, Counters())
    assert unknown.estimate(3, 40) == Estimate(None, None)


def test_tokens_that_others_keep_in_the_cache_are_not_counted(swapping):
    house = swapping(32, enable_prefix_caching=True)
    house.submit("A", tuple(range(1, 18)), max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("B", (*range(1, 18), 30), max_tokens=9, ignore_eos=True)
    house.step()
    holdings = house.core.steps.holdings
    assert holdings.price(house.core.book.get("B")) == (5, 2)
    house.cancel("A")
    house.step(2)
    assert holdings.price(house.core.book.get("B")) == (5, 20)


def sent(moves=0, tokens=0, prompt_tokens=0, again=0):
    out = tuple(Move(at, at) for at in range(moves))
    return SentPlan(
        StepPlan(Boot(1), 1, (), swap_out=out), {}, [], [], tokens, prompt_tokens, again
    )


def test_costs_are_corrected_by_what_steps_take():
    counters = Counters()
    machine = MachineCosts(Costs(100, 1_000.0, 50.0), counters)
    for _ in range(200):
        machine.learn(sent(moves=10), StepTimings(swap_s=0.5))
        machine.learn(sent(tokens=64, prompt_tokens=60), StepTimings(forward_s=0.25))
        machine.learn(sent(tokens=64), StepTimings(forward_s=9.0))  # decodes say nothing of prompts
    assert machine.copy_bytes_per_s == pytest.approx(10 * 100 / 0.5)
    assert machine.prefill_tokens_per_s == pytest.approx(64 / 0.25)
    assert counters.preemption_actual_s[SWAP] == pytest.approx(200 * 0.5)
    assert counters.preemption_actual_s[RECOMPUTE] == 0
    machine.learn(sent(tokens=10, again=5), StepTimings(forward_s=0.5))
    assert counters.preemption_actual_s[RECOMPUTE] == pytest.approx(0.25)


def test_one_step_moves_a_rate_by_a_tenth_of_the_way():
    machine = MachineCosts(Costs(100, 1_000.0, 50.0), Counters())
    machine.learn(sent(moves=10), StepTimings(swap_s=0.5))
    machine.learn(sent(tokens=75, prompt_tokens=75), StepTimings(forward_s=0.5))
    assert machine.copy_bytes_per_s == pytest.approx(0.9 * 1_000 + 0.1 * 2_000)
    assert machine.prefill_tokens_per_s == pytest.approx(0.9 * 50 + 0.1 * 150)


def test_a_rate_that_is_not_known_is_learned():
    machine = MachineCosts(Costs(100, 0.0, 0.0), Counters())
    machine.learn(sent(moves=1), StepTimings(swap_s=0.5))
    machine.learn(sent(tokens=10, prompt_tokens=10), StepTimings(forward_s=0.5))
    assert machine.estimate(1, 20) == Estimate(1.0, 1.0)


def test_who_is_protected_gives_way_to_nobody():
    """The latest unprotected one behind the asker; itself, if it is the last of all."""

    class Someone:
        def __init__(self, name, arrival, is_protected):
            self.request_id, self.arrival, self.is_protected = name, arrival, is_protected

    def victim(protected, asker):
        line = Line(Fcfs())
        people = {name: Someone(name, at, name in protected) for at, name in enumerate("ABC")}
        for someone in people.values():
            line.add(someone)
        chosen = LatestFirst().of(line, people[asker])
        return chosen.request_id if chosen else None

    assert [victim("", asker) for asker in "ABC"] == ["C", "C", "C"]
    assert [victim("C", asker) for asker in "ABC"] == ["B", None, None]
    assert [victim("BC", asker) for asker in "ABC"] == [None, None, None]
    assert [victim("A", asker) for asker in "ABC"] == ["C", "C", "C"]
