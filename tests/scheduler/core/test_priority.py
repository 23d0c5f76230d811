"""`--scheduling-policy priority`: the lowest number first, and nobody waits for a greater one."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import Preemption, PreemptionMode, Refused
from shared.sampling import NO_DRAW
from tests.scheduler.core.test_fairness import order_of_starts

RUNNING, WAITING, SWAPPED = Status.RUNNING, Status.WAITING, Status.SWAPPED


@pytest.fixture
def ranked(build):
    """Builds a house that serves by priority; a start leaves no block free."""

    def build_ranked(*args, **kwargs):
        kwargs = {"watermark": 0.0, "preemption_mode": "recompute", **kwargs}
        return build(*args, scheduling_policy="priority", **kwargs)

    return build_ranked


def submit(house, name, priority, prompt=4, max_tokens=8, **kwargs):
    """A request that never ends by itself before `max_tokens`."""
    extra = {"priority": priority, **kwargs.pop("extra", {})}
    kwargs = {"ignore_eos": True, **kwargs}
    house.submit(name, prompt=prompt, max_tokens=max_tokens, extra=extra, **kwargs)


def statuses(house, names):
    """Where each of them stands."""
    return [house.status(name) for name in names]


def all_are_right(house, names):
    """Run to the end: everybody's answer is the one it gets alone."""
    house.run()
    for name in names:
        assert house.answers(name) == house.solos(name), name


# --------------------------------------------------------------------------- at the door


@pytest.mark.parametrize("priority", [1, -1])
def test_first_come_first_served_refuses_a_priority_and_names_the_flag(house, priority):
    submit(house, "A", priority)
    (refused,) = house.replies(Refused)
    assert (refused.code, refused.param) == (ErrorCode.INVALID, "priority")
    assert "--scheduling-policy" in refused.message
    submit(house, "B", 0)
    assert house.status("B") is RUNNING


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
def test_a_priority_fits_in_32_bits(ranked, priority):
    house = ranked()
    submit(house, "A", priority)
    assert house.replies(Refused)[0].param == "priority"
    submit(house, "B", -(2**31))
    submit(house, "C", 2**31 - 1)
    house.step()
    assert statuses(house, "BC") == [RUNNING, RUNNING]


# --------------------------------------------------------------------------- who is next


def test_the_lowest_number_starts_first_and_of_equals_who_came_first(ranked):
    house = ranked(max_num_seqs=1)
    submit(house, "A", -9)
    for name, priority in zip("BCDEF", (3, -1, 0, 3, -1), strict=True):
        submit(house, name, priority)
    house.run()
    assert order_of_starts(house, "ABCDEF") == list("ACFDBE")
    assert house.core.counters.preemptions.total() == 0


def test_a_request_that_comes_again_after_a_restart_keeps_its_place_among_equals(ranked):
    house = ranked(max_num_seqs=1)
    submit(house, "A", 0)
    submit(house, "B", 1)
    submit(house, "C", 1, age_s=5.0)
    submit(house, "D", 2, age_s=50.0)
    house.run()
    assert order_of_starts(house, "ABCD") == list("ACBD")


def test_the_greatest_number_gives_way_first_though_it_came_first(ranked):
    house = ranked(num_blocks=4, block_size=4)
    submit(house, "A", 5, prompt=7)
    submit(house, "B", 0, prompt=7)
    house.step(3)  # B needs a third block, none is free
    assert statuses(house, "AB") == [WAITING, RUNNING]
    all_are_right(house, "AB")


# --------------------------------------------------------------------------- making way


def test_nobody_gives_way_to_its_equal(ranked):
    house = ranked(num_blocks=6, block_size=4)
    submit(house, "A", 0, prompt=15, max_tokens=4)
    submit(house, "B", 5, prompt=2, max_tokens=4)
    house.step()
    assert statuses(house, "AB") == [RUNNING, RUNNING]
    submit(house, "X", 0, prompt=12, max_tokens=4)  # B's block is not enough for it, with A's it is
    all_are_right(house, "ABX")
    assert house.core.counters.preemptions.total() == 0


def test_who_lacks_a_seat_takes_that_of_a_greater_number_in_the_same_step(ranked):
    house = ranked(max_num_seqs=1)
    submit(house, "B", 5)
    house.step(2)
    submit(house, "X", 0)
    assert house.status("B") is RUNNING  # its plan is in flight, so no round was planned yet
    house.step()
    plan = house.plans[-1]
    gone = house.core.book.get("B").sequences[0].sequence_id
    assert plan.preemptions == (Preemption(gone, PreemptionMode.RECOMPUTE),)
    assert list(house.rows()) == ["X"]
    assert statuses(house, "BX") == [WAITING, RUNNING]
    all_are_right(house, "BX")
    assert house.core.counters.preemptions.total() == 1


def test_who_lacks_blocks_takes_those_of_a_greater_number(ranked):
    house = ranked(num_blocks=4, block_size=4)
    submit(house, "A", 0, max_tokens=5)
    submit(house, "B", 5, prompt=8, max_tokens=8)
    house.step()
    submit(house, "X", 1, prompt=8, max_tokens=4)
    house.step()
    assert house.status("B") is WAITING
    assert list(house.rows()) == ["A"]  # what B gave up settles first
    house.step()
    assert statuses(house, "ABX") == [RUNNING, WAITING, RUNNING]
    all_are_right(house, "ABX")


def test_with_two_plans_in_flight_blocks_are_handed_out_after_the_last_plan_that_names_them(ranked):
    house = ranked(num_blocks=4, block_size=4, plans_in_flight=2)
    submit(house, "B", 5, prompt=12, max_tokens=4)
    house.step()
    submit(house, "X", 0, prompt=9, max_tokens=4)
    house.step()
    assert house.status("B") is WAITING
    in_flight = {block_id for plan in house.in_flight for block_id in plan.rows[0].block_table}
    assert in_flight, "a plan that names B's blocks is still in flight"
    assert house.status("X") is WAITING
    assert in_flight <= set(house.core.steps.holdings.allocator.pool.settling_blocks)
    all_are_right(house, "BX")


def test_no_more_give_way_than_have_to_and_the_last_first(ranked):
    house = ranked(max_num_seqs=3)
    for name, priority in zip("BCD", (5, 7, 5), strict=True):
        submit(house, name, priority, max_tokens=20)
    house.step()
    submit(house, "X", 0)
    house.step()
    assert statuses(house, "BCDX") == [RUNNING, WAITING, RUNNING, WAITING]
    house.step()
    assert statuses(house, "BCDX") == [RUNNING, WAITING, RUNNING, RUNNING]
    submit(house, "Y", 5)
    house.step()
    assert house.status("Y") is WAITING  # equals wait for each other
    all_are_right(house, "BCDXY")


def test_nobody_gives_way_where_all_of_them_would_not_be_enough(ranked):
    house = ranked(num_blocks=6, block_size=4)
    submit(house, "A", 0, prompt=15, max_tokens=9)
    submit(house, "B", 5, prompt=2, max_tokens=3)
    house.step()
    submit(house, "X", 1, prompt=12, max_tokens=2)
    house.step()
    assert statuses(house, "ABX") == [RUNNING, RUNNING, WAITING]
    while house.status("B") is RUNNING:
        house.step()
    assert (len(house.tokens("B")), house.status("X")) == (3, WAITING)
    house.run()
    assert house.core.counters.preemptions.total() == 0
    assert house.answers("X") == house.solos("X")


def test_who_came_back_is_spared_until_it_has_a_new_token(ranked):
    house = ranked(max_num_seqs=1, max_num_batched_tokens=4)
    submit(house, "B", 5, prompt=8)
    house.step(4)
    submit(house, "X", 0, max_tokens=1)
    house.step()
    assert statuses(house, "BX") == [WAITING, RUNNING]
    house.step()
    assert (house.status("B"), len(house.tokens("X"))) == (RUNNING, 1)
    before = len(house.tokens("B"))
    submit(house, "Y", 0)
    house.step()
    assert house.core.book.get("B").is_protected
    assert statuses(house, "BY") == [RUNNING, WAITING]
    while len(house.tokens("B")) == before:
        house.step()
    assert statuses(house, "BY") == [WAITING, RUNNING]
    all_are_right(house, "BXY")


def test_all_answers_of_a_request_make_way_together(ranked):
    house = ranked(num_blocks=10, block_size=4, max_num_seqs=4)
    submit(house, "B", 5, prompt=6, n=3)
    house.step(3)
    submit(house, "X", 0, prompt=9, n=2)
    house.step()
    assert statuses(house, "BX") == [WAITING, RUNNING]
    all_are_right(house, "BX")


def test_blocks_shared_with_a_victim_are_found_again_and_count_once(ranked):
    house = ranked(num_blocks=5, block_size=4, enable_prefix_caching=True)
    prompt = tuple(range(1, 17))
    submit(house, "B", 5, prompt=prompt, max_tokens=4)
    house.step(2)
    submit(house, "X", 0, prompt=(*prompt, 30, 31), max_tokens=2)  # four of its five blocks are B's
    house.step()
    assert house.status("X") is RUNNING
    assert house.core.book.get("X").num_cached == 16
    all_are_right(house, "BX")


# --------------------------------------------------------------------------- tokens of a step


def test_prompts_of_greater_numbers_leave_the_tokens_to_who_comes_before_them(ranked):
    house = ranked(max_num_batched_tokens=4)
    submit(house, "B", 5, prompt=20)
    house.step()
    submit(house, "X", 0, prompt=7)
    house.step()
    assert {name: row[1] for name, row in house.rows().items()} == {"X": 4}
    house.step()
    assert {name: row[1] for name, row in house.rows().items()} == {"X": 3, "B": 1}
    all_are_right(house, "BX")


# --------------------------------------------------------------------------- swapped ones


def test_a_waiting_one_of_a_lower_number_goes_before_swapped_ones_of_greater(ranked):
    house = ranked(num_blocks=4, block_size=4, num_cpu_blocks=8, preemption_mode="swap")
    submit(house, "A", 0, prompt=7, max_tokens=9)
    submit(house, "B", 5, prompt=7, max_tokens=9)
    house.step(3)
    assert statuses(house, "AB") == [RUNNING, SWAPPED]
    submit(house, "X", 1, prompt=9, max_tokens=4)
    submit(house, "Y", 6, prompt=2, max_tokens=2)
    while house.status("A") is RUNNING:
        house.step()
        assert house.status("Y") is WAITING
    assert statuses(house, "BX") == [SWAPPED, RUNNING]
    all_are_right(house, "ABXY")
    assert order_of_starts(house, "ABXY") == list("ABXY")


def test_swapped_and_waiting_ones_take_turns_by_their_numbers(ranked):
    house = ranked(
        num_blocks=9, block_size=4, num_cpu_blocks=20, preemption_mode="swap", max_num_seqs=4
    )  # fmt: skip
    submit(house, "B", 1, max_tokens=20)
    submit(house, "D", 5, max_tokens=20)
    house.step(2)
    submit(house, "X", 0, prompt=30, max_tokens=5)
    house.step(2)
    assert statuses(house, "BDX") == [SWAPPED, SWAPPED, RUNNING]
    submit(house, "C", 3)
    submit(house, "E", 7)
    assert house.status("C") is WAITING
    while house.status("X") is RUNNING:
        house.step()
    plan = house.plans[-1]
    names = {house.sequence(name).sequence_id: name for name in "BCDE"}
    assert len(plan.swap_in) == 4
    assert [names[row.sequence_id] for row in plan.rows] == ["B", "D", "C", "E"]  # decodes first
    all_are_right(house, "BCDEX")


# --------------------------------------------------------------------------- nobody is lost


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_two_classes_in_a_tiny_pool_displace_each_other_and_all_end(ranked, mode, plans_in_flight):
    house = ranked(
        num_blocks=9, block_size=4, num_cpu_blocks=12, preemption_mode=mode, max_num_seqs=3,
        plans_in_flight=plans_in_flight, enable_prefix_caching=True, max_num_batched_tokens=7,
    )  # fmt: skip
    names = [f"{chr(65 + at)}{at}" for at in range(24)]
    for at, name in enumerate(names):
        submit(house, name, 5 * (at % 2), prompt=3 + at % 9, max_tokens=11, n=1 + at % 3 % 2)
        house.step(2)
    all_are_right(house, names)
    assert house.core.counters.preemptions.total() > 5


def test_a_steady_load_of_lower_numbers_starves_a_greater_one_and_the_wait_shows(ranked):
    house = ranked(max_num_seqs=1)
    assert house.core.longest_wait_s(house.now) == 0
    submit(house, "B", 5, max_tokens=4)
    house.step(2)
    gave_way_at = None
    for at in range(30):
        submit(house, f"X{at}", 0, max_tokens=2)
        house.step(2)
        house.later(1.0)
        if gave_way_at is None and house.status("B") is WAITING:
            gave_way_at = house.now
    assert house.status("B") is WAITING
    assert house.core.longest_wait_s(house.now) == pytest.approx(house.now - gave_way_at, abs=1.1)
    all_are_right(house, "B")
    assert house.core.longest_wait_s(house.now) == 0


def test_the_wait_of_those_who_came_before_a_model_was_known_shows_too(build):
    house = build(join=False)
    submit(house, "A", 0, age_s=7.0)
    assert house.core.longest_wait_s(house.now + 2.0) == pytest.approx(9.0)
    house.join()
    assert house.core.longest_wait_s(house.now) == 0


# --------------------------------------------------------------------------- beams


def test_beams_make_way_and_come_back_as_they_were(ranked):
    house = ranked(num_blocks=12, block_size=4, max_num_seqs=4)
    beams = {"draw": NO_DRAW, "use_beam_search": True}
    submit(house, "B", 5, prompt=6, n=3, ignore_eos=False, **beams)
    house.step(4)
    submit(house, "X", 0, prompt=9, n=2, ignore_eos=False, **beams)
    house.step(2)
    assert statuses(house, "BX") == [WAITING, RUNNING]
    all_are_right(house, "BX")
