"""First come, first served, whichever gateway it comes through."""

import pytest

from services.scheduler.core.lifecycle import Status


def order_of_starts(house, names):
    """The names in the order in which their first rows were planned."""
    ids = {house.sequence(name).sequence_id: name for name in names}
    started = []
    for plan in house.plans:
        for row in plan.rows:
            name = ids.get(row.sequence_id)
            if name is not None and name not in started:
                started.append(name)
    return started


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_two_gateways_take_turns_by_arrival_and_nobody_is_overtaken(build, max_num_seqs):
    house = build(num_blocks=64, max_num_seqs=max_num_seqs)
    names = [f"{at:02d}" for at in range(20)]
    for at, name in enumerate(names):
        gateway = "g" if at % 3 else "h"
        house.submit(name, prompt=2 + at % 5, max_tokens=3, ignore_eos=True, gateway=gateway)
    house.run()
    assert order_of_starts(house, names) == names


def test_a_gateway_that_floods_holds_up_nobody_who_came_before(build):
    house = build(num_blocks=64, max_num_seqs=2)
    house.submit("first", max_tokens=3, ignore_eos=True, gateway="h")
    for at in range(30):
        house.submit(f"g{at:02d}", max_tokens=3, ignore_eos=True, gateway="g")
    house.submit("last", max_tokens=3, ignore_eos=True, gateway="h")
    house.run()
    names = ["first", *(f"g{at:02d}" for at in range(30)), "last"]
    assert order_of_starts(house, names) == names


def test_a_small_request_of_one_gateway_does_not_slip_past_a_large_one_of_the_other(build):
    house = build(num_blocks=6, block_size=4)
    house.submit("A", prompt=12, max_tokens=4, ignore_eos=True, gateway="g")
    house.submit("B", prompt=20, max_tokens=2, ignore_eos=True, gateway="h")
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True, gateway="g")
    house.step()
    assert [house.status(name) for name in "BC"] == [Status.WAITING, Status.WAITING]
    house.run()
    assert order_of_starts(house, "ABC") == ["A", "B", "C"]


def test_one_that_wants_scores_is_not_overtaken_by_one_that_does_not(build):
    house = build(max_scored_tokens=3)
    house.submit("A", prompt=9, max_tokens=2, prompt_logprobs=0, ignore_eos=True, gateway="g")
    house.submit("B", prompt=9, max_tokens=2, prompt_logprobs=0, ignore_eos=True, gateway="h")
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True, gateway="g")
    house.run()
    assert order_of_starts(house, "ABC") == ["A", "B", "C"]


def test_age_restores_the_order_of_both_gateways_after_a_restart(build):
    """They come back one gateway after the other; each says how long ago its client asked."""
    house = build(max_num_seqs=1, join=False)
    asked = {"A": "g", "B": "h", "C": "g", "D": "h", "E": "g"}
    for gateway in "hg":
        for place, (name, owner) in enumerate(asked.items()):
            if owner == gateway:
                house.submit(
                    name, max_tokens=2, ignore_eos=True, gateway=owner, age_s=9.0 - place,
                    extra={"resubmitted": True},
                )  # fmt: skip
    house.submit("new", max_tokens=2, ignore_eos=True, gateway="h")
    house.join()
    house.run()
    assert order_of_starts(house, [*asked, "new"]) == [*asked, "new"]


def test_who_gave_way_comes_back_before_all_who_came_later_through_either_gateway(build):
    house = build(num_blocks=5, block_size=4)
    house.submit("A", prompt=8, max_tokens=9, ignore_eos=True, gateway="g")
    house.submit("B", prompt=7, max_tokens=9, ignore_eos=True, gateway="h")
    while house.status("B") is not Status.WAITING:
        house.step()
    for name, gateway in (("C", "g"), ("D", "h")):
        house.submit(name, prompt=2, max_tokens=1, ignore_eos=True, gateway=gateway)
    while house.status("B") is Status.WAITING:
        assert [house.status(name) for name in "CD"] == [Status.WAITING, Status.WAITING]
        house.step()
    house.run()
    for name, gateway in (("A", "g"), ("B", "h"), ("C", "g"), ("D", "h")):
        assert house.tokens(name, gateway) == house.solo(name)
