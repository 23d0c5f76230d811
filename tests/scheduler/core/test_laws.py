"""The laws speak: each fault planted here is told by the law it breaks."""

import pytest

from services.scheduler.core.laws import check_laws
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.sequence import Finish
from shared.errors import InvariantBroken
from shared.sampling import FinishReason
from tests.scheduler.core.house import House


@pytest.fixture
def at_work():
    house = House()
    for name in "AB":
        house.submit(name, prompt=6, max_tokens=8, ignore_eos=True)
    house.step(2)
    check_laws(house.core)
    return house


def leak_a_block(house):
    house.core.steps.holdings.allocator.pool.take()


def free_under_a_plan(house):
    sequence = house.sequence("A")
    house.core.steps.holdings.allocator.free(sequence.table)


def skip_a_place(house):
    house.sequence("A").table.block_ids.append(house.core.steps.holdings.allocator.pool.take())


def count_twice(house):
    house.core.steps.holdings.allocator.pool.share(house.sequence("A").table.block_ids[0])


def finish_aside(house):
    house.sequence("A").finish = Finish(FinishReason.STOP)


def leave_the_line(house):
    house.core.book.get("A").status = Status.WAITING


def lose_a_plan(house):
    house.core.steps.in_flight.clear()


def miscount(house):
    house.core.counters.requests_accepted += 1


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (leak_a_block, "law 4, free"), (free_under_a_plan, "law 4, every table has one owner"),
        (skip_a_place, "law 6"), (count_twice, "law 4, reference counts"),
        (finish_aside, "finished means"), (leave_the_line, "lines, waiting"),
        (lose_a_plan, "no stall"), (miscount, "every request ends once"),
    ],
)  # fmt: skip
def test_a_fault_is_told_by_the_law_it_breaks(at_work, fault, law):
    fault(at_work)
    with pytest.raises(InvariantBroken, match=law):
        check_laws(at_work.core)
