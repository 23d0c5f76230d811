"""The request's own KV bill: what it cost in blocks, to the block."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.messages import Costs, KVBill
from shared.sampling import NO_DRAW

FREE = {"copied_blocks": 0, "preemptions_swap": 0, "preemptions_recompute": 0, "swapped_bytes": 0}


@pytest.fixture
def billing(build):
    """Builds a house that keeps bills; a block has 64 bytes."""

    def build_billing(*args, **kwargs):
        return build(*args, enable_kv_bill=True, costs=Costs(64, 1e6, 1e3), **kwargs)

    return build_billing


def bill(house, name, index=0):
    """What its gateway was told with the end of one sequence."""
    return house.stream(name, index=index).finished.usage.bill


def test_nobody_is_billed_unless_it_is_asked_for(house):
    house.submit("A")
    house.run()
    assert house.core.book.get("A").bill is None
    assert bill(house, "A") is None


def test_one_answer_holds_what_it_needs_and_saves_nothing(billing):
    house = billing(block_size=4)
    house.submit("A", prompt=5, max_tokens=8, ignore_eos=True)
    house.run()  # of thirteen tokens the last is never computed
    assert bill(house, "A") == KVBill(3, 0, 0.0, **FREE)


def test_four_answers_share_the_full_blocks_of_their_prompt(billing):
    house = billing(block_size=4)
    house.submit("A", prompt=8, max_tokens=4, ignore_eos=True, n=4)
    house.run()
    # Four steps: the prompt (2 blocks, 8 without sharing), then three in which each has a block
    # of its own (6 blocks, 12 without sharing).
    assert bill(house, "A", 3) == KVBill(6, 6, (6 + 3 * 6) / (8 + 3 * 12), **FREE)


def test_figure_8_copies_one_block_and_the_last_owner_none(billing):
    house = billing(block_size=4)
    house.submit("A", prompt=7, max_tokens=2, ignore_eos=True, n=2)
    house.run()
    # The prompt: 2 blocks for 4; then one copies the last one and both write: 3 blocks for 4.
    assert bill(house, "A", 1) == KVBill(3, 2, 3 / 8, **{**FREE, "copied_blocks": 1})
    assert house.core.counters.cow_copies == 1


def test_what_gave_way_by_recompute_is_counted(billing):
    house = billing(num_blocks=4, block_size=4, preemption_mode="recompute")
    house.submit("A", prompt=7, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=9, ignore_eos=True)
    house.run()
    assert house.core.counters.preemptions.total() == 1
    assert bill(house, "A") == KVBill(4, 0, 0.0, **FREE)
    assert bill(house, "B") == KVBill(4, 0, 0.0, **{**FREE, "preemptions_recompute": 1})


def test_what_was_swapped_is_counted_both_ways_each_block_once(billing):
    house = billing(num_blocks=6, block_size=4, num_cpu_blocks=8, preemption_mode="swap")
    house.submit("A", prompt=7, max_tokens=10, ignore_eos=True)
    house.submit("B", prompt=4, max_tokens=8, ignore_eos=True, n=2)
    while house.status("B") is not Status.SWAPPED:
        house.step()
    (out,) = [len(plan.swap_out) for plan in house.plans if plan.swap_out]
    house.run()
    back = sum(len(plan.swap_in) for plan in house.plans)
    assert out == back == 3  # one that both have, and one each
    told = bill(house, "B", 1)
    assert (told.preemptions_swap, told.preemptions_recompute) == (1, 0)
    assert told.swapped_bytes == (out + back) * 64
    assert bill(house, "A").swapped_bytes == 0


def test_all_that_is_billed_is_all_that_was_done(billing):
    house = billing(
        num_blocks=12, block_size=4, num_cpu_blocks=9, watermark=0.0, enable_prefix_caching=True,
        plans_in_flight=2,
    )  # fmt: skip
    names = [f"{chr(65 + at)}" for at in range(12)]
    for at, name in enumerate(names):
        house.submit(name, prompt=3 + at % 6, max_tokens=9, ignore_eos=True, n=1 + at % 3)
    house.run()
    bills = [house.core.book.get(name).bill.told() for name in names]
    counters = house.core.counters
    assert sum(one.copied_blocks for one in bills) == counters.cow_copies > 0
    given_way = [one.preemptions_swap + one.preemptions_recompute for one in bills]
    assert sum(given_way) == counters.preemptions.total() > 0
    moved = counters.swap_out_blocks + counters.swap_in_blocks
    assert sum(one.swapped_bytes for one in bills) == 64 * moved
    assert all(0 <= one.sharing_saved < 1 for one in bills)


def test_beams_are_billed_for_what_they_hold(billing):
    house = billing(block_size=4, num_blocks=32)
    house.submit(
        "A", prompt=8, max_tokens=6, n=3, draw=NO_DRAW, use_beam_search=True, ignore_eos=True
    )  # fmt: skip
    house.run()
    told = bill(house, "A", 2)
    assert told.copied_blocks == house.core.counters.cow_copies > 0
    assert told.peak_saved_blocks >= 4  # two beams more on the two blocks of the prompt
    assert 0 < told.sharing_saved < 1
