"""Pinned prefixes: computed first, held for good, shared with whoever begins with them."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.errors import ErrorCode
from shared.messages import PreemptionMode, Unpinned
from shared.sampling import NO_DRAW
from tests.scheduler.core.toys import VOCAB

PREFIX = tuple(range(1, 11))  # two blocks of four and a half


@pytest.fixture(params=(True, False), ids=("cache", "no cache"))
def pinned(request, build):
    """A house in which PREFIX is pinned, with the prefix cache on and off."""

    def build_pinned(num_blocks=16, block_size=4, tokens=PREFIX, **settings):
        house = build(num_blocks, block_size, enable_prefix_caching=request.param, **settings)
        house.pin("P", tokens)
        house.run()
        assert house.pins()["P"].is_ready
        return house

    return build_pinned


def refusal(house, name):
    return house.stream(name).refused


def cached_tokens(house, name):
    return house.stream(name).finished.usage.cached_tokens


def counters(house):
    return house.core.counters


# ------------------------------------------------------------------ a pin's own life


def test_a_prefix_is_computed_told_and_rests_on_its_blocks(house):
    house.pin("P", PREFIX, context=b"mine")
    told = house.pins()["P"]
    assert (told.num_tokens, told.num_blocks, told.is_ready) == (10, 3, False)
    assert "P" not in house.gateways[b"g"].pinned
    house.run()
    told = house.gateways[b"g"].pinned["P"]
    assert (told.is_ready, told.context, told.num_hits) == (True, b"mine", 0)
    assert [filled for _, filled in house.pin_table("P")] == [4, 4, 2]
    assert (house.core.num_pins, house.core.num_pinned_blocks) == (1, 3)
    assert not house.in_flight


def test_a_pin_is_no_request_in_any_count(house):
    house.pin("P", PREFIX)
    core = house.core
    assert (core.num_running, core.num_waiting, core.num_queued, len(core.book)) == (0, 0, 0, 0)
    house.run()
    assert core.num_running == 0
    assert counters(house).requests_accepted == counters(house).prompt_tokens == 0
    assert counters(house).requests_finished.total() == 0
    assert (counters(house).pins_taken, counters(house).computed_tokens) == (1, len(PREFIX))


def test_unpinned_blocks_are_free_again_and_who_asked_and_who_pinned_hear_it(house):
    house.pin("P", PREFIX)
    house.run()
    house.unpin("P", gateway="h")
    assert house.gateways[b"g"].unpinned == house.gateways[b"h"].unpinned == ["P"]
    assert (house.free, house.pins()) == (16, {})


def test_a_prefix_unpinned_while_it_is_computed_ends(house):
    house.pin("P", PREFIX)
    assert house.in_flight
    house.unpin("P")
    house.run()
    assert house.free == 16
    assert "P" not in house.gateways[b"g"].pinned


def test_the_same_id_again_is_answered_again_and_with_other_tokens_refused(house):
    house.pin("P", PREFIX)
    house.run()
    house.gateways[b"g"].pinned.clear()
    house.pin("P", PREFIX, gateway="h")
    assert house.gateways[b"h"].pinned["P"].is_ready
    assert counters(house).pins_taken == 1
    house.pin("P", (9, 9))
    assert refusal(house, "P").code is ErrorCode.INVALID
    house.unpin("P", gateway="g")
    assert house.gateways[b"h"].unpinned == ["P"], "its owner is who asked last"


def test_an_unknown_prefix_and_one_of_another_key_are_told_apart_by_nobody(house):
    house.pin("P", PREFIX, key_hash=b"k")
    house.unpin("Q")
    house.unpin("P", key_hash=b"other")
    assert refusal(house, "Q").code is refusal(house, "P").code is ErrorCode.UNKNOWN_PREFIX
    assert refusal(house, "Q").message == refusal(house, "P").message
    assert (list(house.pins(key_hash=b"k")), house.pins()) == (["P"], {})


def test_a_prefix_outlives_its_gateway(house):
    house.pin("P", PREFIX)
    house.run()
    house.lose_gateway()
    assert house.pins(gateway="h")["P"].is_ready


def test_a_prefix_waits_for_a_model_and_goes_before_the_requests_that_wait_too(build):
    house = build(join=False)
    house.submit("A", (*PREFIX, 7), max_tokens=2)
    house.pin("P", PREFIX)
    told = house.pins()["P"]
    assert (told.num_tokens, told.num_blocks, told.is_ready) == (10, 0, False)
    house.join()
    house.run()
    assert cached_tokens(house, "A") == 10


def test_a_prefix_that_waits_for_a_model_can_be_let_go(build):
    house = build(join=False)
    house.pin("P", PREFIX)
    house.unpin("P")
    house.join()
    assert (house.pins(), house.in_flight) == ({}, [])


# ------------------------------------------------------------------ who begins with it


def test_who_begins_with_it_starts_on_all_of_it_and_copies_the_last_block(pinned):
    house = pinned()
    table = [block for block, _ in house.pin_table("P")]
    house.submit("A", (*PREFIX, 31, 32), max_tokens=3)
    plan = house.plans[-1]
    assert [(move.source, move.destination) for move in plan.copies] == [
        (table[2], house.table("A")[2][0])
    ]
    assert [(row.first_position, row.token_ids) for row in plan.rows] == [(10, (31, 32))]
    assert [house.ref_count(block) for block in table] == [2, 2, 1]
    assert [block for block, _ in house.table("A")][:2] == table[:2]
    assert counters(house).cow_copies == 1
    house.run()
    assert house.tokens("A") == house.solo("A")
    assert cached_tokens(house, "A") == 10
    assert (house.pins()["P"].num_hits, counters(house).pin_hits) == (1, 1)
    assert [filled for _, filled in house.pin_table("P")] == [4, 4, 2]


def test_who_is_exactly_it_computes_its_last_token_again(pinned):
    house = pinned()
    house.submit("A", PREFIX, max_tokens=3)
    assert [row.first_position for row in house.plans[-1].rows] == [9]
    house.run()
    assert house.tokens("A") == house.solo("A")
    assert cached_tokens(house, "A") == 9
    house.submit("B", (*PREFIX, 5), max_tokens=3)
    house.run()
    assert house.tokens("B") == house.solo("B"), "the pin's own block was not written to"


def test_who_has_only_a_part_of_it_starts_on_the_full_blocks_of_that(pinned):
    house = pinned()
    house.submit("A", (*PREFIX[:6], 31, 32, 33), max_tokens=3)
    house.submit("B", (*PREFIX[:3], 31, 32, 33), max_tokens=3)
    house.submit("C", PREFIX[:8], max_tokens=3)
    house.run()
    assert [cached_tokens(house, name) for name in "ABC"] == [4, 0, 4]
    assert house.pins()["P"].num_hits == 2
    assert [house.tokens(name) for name in "ABC"] == [house.solo(name) for name in "ABC"]


@pytest.mark.parametrize("tokens", [PREFIX[:8], PREFIX])
def test_a_pin_of_full_blocks_needs_no_copy(pinned, tokens):
    house = pinned(tokens=tokens)
    house.submit("A", (*tokens, 31), max_tokens=3)
    house.run()
    assert cached_tokens(house, "A") == len(tokens)
    assert counters(house).cow_copies == (len(tokens) % 4 > 0)
    assert house.tokens("A") == house.solo("A")


def test_other_keys_and_salts_find_nothing(pinned):
    house = pinned()
    prompt = (*PREFIX, 31)
    house.submit("A", prompt, key_hash=b"k", max_tokens=2)
    house.submit("B", prompt, max_tokens=2, extra={"cache_salt": "s"})
    house.submit("C", prompt, max_tokens=2)
    house.run()
    assert [cached_tokens(house, name) for name in "ABC"] == [0, 0, 10]


def test_a_prefix_of_a_key_is_found_with_that_key_and_its_salt_alone(pinned):
    house = pinned()
    house.unpin("P")
    house.pin("Q", PREFIX, key_hash=b"k", cache_salt="s")
    house.run()
    salted = {"cache_salt": "s"}
    house.submit("A", (*PREFIX, 31), max_tokens=2, extra=salted)
    house.submit("B", (*PREFIX, 32), max_tokens=2, extra=salted, key_hash=b"other")
    house.submit("C", (*PREFIX, 33), max_tokens=2, extra={"cache_salt": "t"}, key_hash=b"k")
    house.submit("D", (*PREFIX, 34), max_tokens=2, extra=salted, key_hash=b"k")
    house.run()
    assert [cached_tokens(house, name) for name in "ABCD"] == [0, 0, 0, 10]
    assert house.pins(key_hash=b"k")["Q"].num_hits == 1


def test_the_longest_of_several_is_taken_and_it_alone_is_hit(pinned):
    house = pinned()
    house.pin("Q", (*PREFIX, 11, 12, 13))
    house.run()
    house.submit("A", (*PREFIX, 11, 12, 13, 14), max_tokens=2)
    house.run()
    assert cached_tokens(house, "A") == 13
    assert {name: pin.num_hits for name, pin in house.pins().items()} == {"P": 0, "Q": 1}


def test_several_start_on_one_prefix_in_one_step_and_copy_its_last_block_each(pinned):
    house = pinned(32)
    house.lose_executor()
    for name in "ABC":
        house.submit(name, (*PREFIX, 31 + ord(name) % 5), max_tokens=4)
    house.join()
    house.run()
    assert [cached_tokens(house, name) for name in "ABC"] == [10] * 3
    assert counters(house).cow_copies == 3
    assert [house.tokens(name) for name in "ABC"] == [house.solo(name) for name in "ABC"]


def test_n_answers_start_on_it_together(pinned):
    house = pinned(32)
    house.submit("A", (*PREFIX, 31), max_tokens=6, n=3, ignore_eos=True)
    house.run()
    assert house.answers("A") == house.solos("A")
    assert cached_tokens(house, "A") == 10


def test_beams_start_on_it(pinned, build):
    wish = {"prompt": (*PREFIX, 31), "max_tokens": 5, "n": 3, "use_beam_search": True}
    plain = build(32)
    plain.submit("A", draw=NO_DRAW, **wish)
    plain.run()
    house = pinned(32)
    house.submit("A", draw=NO_DRAW, **wish)
    house.run()
    assert house.answers("A") == plain.answers("A")
    assert all(house.answers("A"))
    assert cached_tokens(house, "A") == 10
    assert [filled for _, filled in house.pin_table("P")] == [4, 4, 2]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prefix_starts_before_those_who_were_swapped_out(build, policy):
    house = build(8, num_cpu_blocks=16, preemption_mode="swap", watermark=0.0,
                  scheduling_policy=policy)  # fmt: skip
    for name in "AB":
        house.submit(name, 3, max_tokens=20, ignore_eos=True)
    while Status.SWAPPED not in map(house.status, "AB"):
        house.step()
    house.pin("P", (7,))
    house.step(2)
    assert house.pins()["P"].is_ready
    house.run()
    assert [house.tokens(name) for name in "AB"] == [house.solo(name) for name in "AB"]


def test_a_prompt_that_is_scored_takes_no_hits(pinned):
    house = pinned()
    house.submit("A", (*PREFIX, 31), max_tokens=2, prompt_logprobs=0)
    house.run()
    assert cached_tokens(house, "A") == 0
    assert house.pins()["P"].num_hits == 0
    assert house.stream("A").prompt_logprobs == house.scores("A")


def test_who_gave_way_comes_back_on_it_and_counts_once(pinned):
    house = pinned(8, preemption_mode="recompute", watermark=0.0)
    for name in "AB":
        house.submit(name, (*PREFIX, ord(name) % 30), max_tokens=9, ignore_eos=True)
    house.run()
    assert counters(house).preemptions[PreemptionMode.RECOMPUTE] > 0
    assert [house.tokens(name) for name in "AB"] == [house.solo(name) for name in "AB"]
    assert house.pins()["P"].num_hits == 2
    assert [filled for _, filled in house.pin_table("P")] == [4, 4, 2]


def test_who_shares_it_keeps_its_blocks_when_it_is_unpinned(pinned):
    house = pinned()
    house.submit("A", (*PREFIX, 31), max_tokens=6, ignore_eos=True)
    house.unpin("P")
    assert house.replies(Unpinned)
    assert all(house.ref_count(block) == 1 for block, _ in house.table("A"))
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_the_source_of_a_copy_in_flight_is_not_handed_out(pinned):
    house = pinned(7, max_pinned_share=0.5, plans_in_flight=2)
    house.submit("A", (*PREFIX, 31), max_tokens=3, ignore_eos=True)
    assert house.in_flight[0].copies
    house.unpin("P")  # the copy has not run yet
    house.submit("B", 6, max_tokens=3)
    house.run()
    assert [house.tokens(name) for name in "AB"] == [house.solo(name) for name in "AB"]


def test_the_same_content_twice_shares_its_full_blocks_and_outlives_the_first(pinned):
    house = pinned()
    house.pin("Q", PREFIX)
    house.run()
    assert house.core.num_pinned_blocks == 4
    house.unpin("P")
    house.submit("A", (*PREFIX, 31), max_tokens=3)
    house.run()
    assert (cached_tokens(house, "A"), house.pins()["Q"].num_hits) == (10, 1)


def test_two_of_the_same_that_come_together_wait_for_each_other_only_once(build):
    house = build(enable_prefix_caching=False, join=False)
    house.pin("P", PREFIX)
    house.pin("Q", PREFIX)
    house.join()
    house.run()
    assert all(pin.is_ready for pin in house.pins().values())
    assert counters(house).computed_tokens == 11
    assert house.core.num_pinned_blocks == 4


def test_a_request_waits_for_a_prefix_that_is_being_computed(build):
    house = build(max_num_batched_tokens=4)
    house.pin("P", PREFIX)
    house.submit("A", (*PREFIX, 31), max_tokens=3)
    assert house.status("A") is Status.WAITING
    house.run()
    assert (cached_tokens(house, "A"), house.tokens("A")) == (10, house.solo("A"))


# ------------------------------------------------------------------ pressure


def test_pinned_blocks_are_never_evicted_swapped_or_taken(build):
    house = build(10, num_cpu_blocks=10, preemption_mode="swap", watermark=0.0)
    house.pin("P", PREFIX)
    house.run()
    table = house.pin_table("P")
    for name in "ABCD":
        house.submit(name, 5, max_tokens=15, ignore_eos=True)
    house.run()
    assert counters(house).preemptions[PreemptionMode.SWAP] > 0
    assert house.pin_table("P") == table
    moved = {move.source for plan in house.plans for move in plan.swap_out}
    assert not moved & {block for block, _ in table}
    assert [house.tokens(name) for name in "ABCD"] == [house.solo(name) for name in "ABCD"]


def test_a_prefix_is_computed_among_those_who_grow_and_gives_way_to_nobody(build):
    house = build(8, max_num_batched_tokens=4, watermark=0.0, preemption_mode="recompute")
    for name in "AB":
        house.submit(name, 3, max_tokens=12, ignore_eos=True)
    house.step(2)
    of_b = house.sequence("B").sequence_id
    house.pin("P", PREFIX)
    while not house.pins()["P"].is_ready:
        house.step()
    told = [told.sequence_id for plan in house.plans for told in plan.preemptions]
    assert told == [of_b], "somebody gave way while it was computed, and it did not"
    house.run()
    assert [house.tokens(name) for name in "AB"] == [house.solo(name) for name in "AB"]


def test_one_alone_uses_all_that_is_not_pinned(pinned):
    house = pinned(8, max_pinned_share=0.5)
    house.submit("A", 5, max_tokens=16, ignore_eos=True)  # five blocks, all that is left
    house.run()
    assert house.tokens("A") == house.solo("A")


# ------------------------------------------------------------------ the budget


def test_more_than_the_share_is_refused_with_both_numbers_and_the_flag(house):
    house.pin("P", range(1, 29))  # seven of eight blocks
    house.pin("Q", PREFIX)
    told = refusal(house, "Q")
    assert told.code is ErrorCode.PREFIX_BUDGET
    assert "needs 3 blocks of 4 tokens beside 7" in told.message
    assert "at most 8 of 16" in told.message
    assert "--max-pinned-share 0.5" in told.message
    assert told.retry_after_s is None
    assert counters(house).pins_refused == {ErrorCode.PREFIX_BUDGET: 1}


def test_the_whole_share_may_be_pinned_and_not_a_block_more(house):
    house.pin("P", range(1, 33))  # eight blocks, half of sixteen
    house.pin("Q", (5,))
    house.run()
    assert refusal(house, "P") is None
    assert (list(house.pins()), house.core.num_pinned_blocks) == (["P"], 8)
    assert "needs 1 blocks of 4 tokens beside 8" in refusal(house, "Q").message


def test_a_prefix_waits_for_nobody_it_could_not_live_beside(house):
    house.submit("A", 5, max_tokens=56)  # fifteen blocks
    house.pin("P", PREFIX)
    told = refusal(house, "P")
    assert (told.code, told.retry_after_s) == (ErrorCode.PREFIX_BUDGET, 5.0)
    assert "may need 15 of the 16: try again when it has ended" in told.message
    house.run()
    house.pin("P", PREFIX)
    house.run()
    assert house.pins()["P"].is_ready


def test_a_request_that_does_not_fit_beside_the_pins_hears_of_them(pinned):
    house = pinned()
    house.submit("A", 5, max_tokens=60)
    assert refusal(house, "A").code is ErrorCode.NEVER_FITS
    assert "has 16, 3 of them for pinned prefixes" in refusal(house, "A").message
    house.submit("B", 5, max_tokens=None)
    assert house.stream("B").max_tokens == 13 * 4 - 5 + 1
    house.cancel("B")


def test_what_cannot_be_a_prefix_is_refused_by_name(build):
    house = build(64, max_model_len=20)
    house.pin("A", ())
    house.pin("B", (1, VOCAB))
    house.pin("C", (1,) * 20)
    house.pin("D", (1,) * 19)
    house.pin("E" * 300, (1,))
    house.pin("F", (1,), context=bytes(5000))
    codes = [refusal(house, name) and refusal(house, name).code for name in ("A", "B", "C", "D")]
    assert codes == [ErrorCode.INVALID, ErrorCode.INVALID, ErrorCode.CONTEXT_LENGTH, None]
    assert refusal(house, "E" * 300).param == "id"
    assert refusal(house, "F").param == "context"
    assert list(house.pins()) == ["D"]


def test_there_are_at_most_so_many(build):
    house = build(4096, 1, laws_every=2000)
    for number in range(1025):
        house.pin(f"{number}", (1,))
    assert "1024 prefixes are pinned" in refusal(house, "1024").message
    assert len(house.pins()) == 1024


# ------------------------------------------------------------------ losses


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_an_executor_that_comes_back_computes_pins_before_it_admits_anybody(
    pinned, plans_in_flight
):
    house = pinned(max_num_batched_tokens=4, plans_in_flight=plans_in_flight)
    house.submit("A", (*PREFIX, 31), max_tokens=8, ignore_eos=True)
    house.step(2)
    house.lose_executor()
    house.submit("B", 3, max_tokens=2)
    assert not house.pins()["P"].is_ready
    before = len(house.plans)
    house.join()
    house.run()
    first, second, third, *_ = house.plans[before:]
    assert [row.token_ids for row in (*first.rows, *second.rows)] == [PREFIX[:4], PREFIX[4:8]]
    assert third.rows[0].token_ids == PREFIX[8:], "only what is left of a step is for others"
    assert [house.tokens(name) for name in "AB"] == [house.solo(name) for name in "AB"]
    house.submit("C", (*PREFIX, 31), max_tokens=2)
    house.run()
    assert cached_tokens(house, "C") == 10


def test_of_a_smaller_pool_the_oldest_keep_their_place_and_the_others_are_told(house):
    house.pin("P", PREFIX)
    house.pin("Q", (*PREFIX, 11, 12, 13))
    house.pin("R", (5,))
    house.run()
    house.join(num_blocks=8)
    house.run()
    assert sorted(house.pins()) == ["P", "R"]
    assert refusal(house, "Q").code is ErrorCode.PREFIX_BUDGET
    assert "cannot keep this prefix" in refusal(house, "Q").message
    assert counters(house).pins_dropped == 1
    assert all(pin.is_ready for pin in house.pins().values())


def test_blocks_of_another_size_hold_it_as_well(pinned):
    house = pinned()
    house.join(block_size=2, num_blocks=40)
    house.run()
    house.submit("A", (*PREFIX, 31), max_tokens=3)
    house.run()
    assert (cached_tokens(house, "A"), house.tokens("A")) == (10, house.solo("A"))


def test_a_prefix_at_which_the_executor_dies_thrice_is_dropped(house):
    house.pin("P", PREFIX)
    for _ in range(3):
        assert house.in_flight
        house.lose_executor()
        house.join()
    assert "lost 3 times" in refusal(house, "P").message
    assert (house.pins(), counters(house).pins_dropped) == ({}, 1)


def test_a_prefix_whose_row_fails_or_is_refused_is_dropped(house):
    house.pin("P", PREFIX)
    house.step(failing_rows={house.plans[-1].rows[0].sequence_id})
    assert "logits are not numbers" in refusal(house, "P").message
    house.pin("Q", PREFIX)
    house.refuse_step("cannot")
    assert refusal(house, "Q").code is ErrorCode.INTERNAL
    assert (house.pins(), house.free) == ({}, 16)


def test_a_request_in_a_refused_plan_ends_and_the_prefix_stays(pinned):
    house = pinned()
    house.submit("A", (*PREFIX, 31), max_tokens=3)
    house.refuse_step()
    assert house.pins()["P"].is_ready
    house.submit("B", (*PREFIX, 31), max_tokens=3)
    house.run()
    assert (cached_tokens(house, "B"), house.tokens("B")) == (10, house.solo("B"))
