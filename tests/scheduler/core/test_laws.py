"""The laws speak: each fault planted here is told by the law it breaks."""

import pytest

from services.scheduler.core.laws import check_laws
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.pins import Prefix
from services.scheduler.core.sequence import Finish
from shared.errors import InvariantBroken
from shared.ids import RequestId, SequenceId
from shared.messages import Pin, PositionLogprobs
from shared.sampling import NO_DRAW, FinishReason
from tests.scheduler.core.house import House


@pytest.fixture
def at_work():
    house = House(enable_prefix_caching=True, num_cpu_blocks=4)
    for name in "AB":
        house.submit(name, prompt=6, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
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


def cache_a_stranger(house):
    pool = house.core.steps.holdings.allocator.pool
    block = pool.take()
    pool.keep(block)
    pool.release(block)
    pool.settle()


def expect_what_nobody_computes(house):
    house.core.steps.holdings.prefix.expect(b"nothing")


def leak_a_cpu_block(house):
    house.core.steps.holdings.cpu.pool.take()


def hold_both_pools(house):
    sequence = house.sequence("A")
    sequence.swapped = house.core.steps.holdings.cpu.start()


def hand_out_what_a_plan_names(house):
    holdings = house.core.steps.holdings
    sequence = house.sequence("A")
    sequence.table.last_step = 0
    holdings.release(sequence)
    holdings.settle(None)


def draw_thrice(house):
    house.sequence("A").ahead = 3


def know_a_block_twice(house):
    prefix = house.core.steps.holdings.prefix
    prefix.add(b"again", next(iter(prefix.blocks.values())))


def finish_aside(house):
    house.sequence("A").finish = Finish(FinishReason.STOP)


def leave_the_line(house):
    house.core.book.get("A").status = Status.WAITING


def lose_a_plan(house):
    house.core.steps.in_flight.clear()


def miscount(house):
    house.core.counters.requests_accepted += 1


def lose_a_logprob(house):
    house.sequence("A").logprobs.pop()


def lose_a_score(house):
    house.core.book.get("A").prompt_logprobs.pop()


def score_too_late(house):
    request = house.core.book.get("A")
    request.prompt_logprobs.pop()
    request.num_unscored += 1


def miscount_the_queue(house):
    house.core.book.num_queued += 1


def miscount_the_queued_tokens(house):
    house.core.book.num_queued_tokens -= 1


def queue_what_runs(house):
    request = house.core.book.get("A")
    request.is_queued = True
    house.core.book.num_queued += 1
    house.core.book.num_queued_tokens += len(request.submit.prompt)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (leak_a_block, "law 4, free"), (free_under_a_plan, "law 4, every table has one owner"),
        (skip_a_place, "law 6"), (count_twice, "law 4, reference counts"),
        (finish_aside, "finished means"), (leave_the_line, "lines, waiting"),
        (cache_a_stranger, "cache, cached blocks are known"),
        (expect_what_nobody_computes, "cache, what is coming"), (leak_a_cpu_block, "law 4, free"),
        (hold_both_pools, "law 5, blocks in one pool"), (draw_thrice, "draws in flight"),
        (hand_out_what_a_plan_names, "law 5, running ones|law 2"),
        (know_a_block_twice, "cache, a block for each"), (lose_a_plan, "no stall"),
        (miscount, "every request ends once"),
        (lose_a_logprob, "a logprob for each token"),
        (lose_a_score, "a score for each prompt token"),
        (score_too_late, "a prompt is scored before its answer"),
        (miscount_the_queue, "the queue's count"),
        (miscount_the_queued_tokens, "the queue's count"),
        (queue_what_runs, "the queue's count"),
    ],
)  # fmt: skip
def test_a_fault_is_told_by_the_law_it_breaks(at_work, fault, law):
    fault(at_work)
    with pytest.raises(InvariantBroken, match=law):
        check_laws(at_work.core)


@pytest.fixture
def searching():
    house = House(64, num_cpu_blocks=4)
    house.submit("A", prompt=6, max_tokens=8, n=3, use_beam_search=True, draw=NO_DRAW)
    house.step(2)
    check_laws(house.core)
    return house


def beam_of(house):
    return house.core.book.get("A").beams[1]


def find_a_text_twice(house):
    beam_of(house).generated[:] = house.core.book.get("A").beams[0].generated


def run_ahead(house):
    beam_of(house).generated.append(1)


def forget_a_seat(house):
    house.core.book.get("A").num_spare_seats += 1


def tell_too_early(house):
    house.sequence("A").generated.append(1)


def believe_a_report_of_less(house):
    beam_of(house).report = PositionLogprobs(-1.0, 1)
    beam_of(house).table.num_filled -= 1


def sit_on_reports(house):
    for beam in house.core.book.get("A").beams:
        beam.report = PositionLogprobs(-1.0, 1)


def lose_the_beams(house):
    house.core.book.get("A").beams = ()


def hold_blocks_without_a_stem(house):
    one, other, third = house.core.book.get("A").beams
    other.stem, third.stem = one, other
    house.core.steps.holdings.release(other)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (find_a_text_twice, "beams, each another text"), (run_ahead, "beams, all of one length"),
        (forget_a_seat, "beams, each another text"), (tell_too_early, "a logprob|answers come at"),
        (believe_a_report_of_less, "beams, a report is of all"),
        (sit_on_reports, "beams, no search waits"), (lose_the_beams, "law 4, every table has one"),
        (hold_blocks_without_a_stem, "law 5, running ones hold"),
    ],
)  # fmt: skip
def test_a_fault_of_beams_is_told_by_the_law_it_breaks(searching, fault, law):
    fault(searching)
    with pytest.raises(InvariantBroken, match=law):
        check_laws(searching.core)


@pytest.fixture
def beside_a_pin():
    house = House(16, 4, num_cpu_blocks=4, enable_prefix_caching=True)
    house.pin("P", range(1, 11))
    house.run()
    house.submit("A", prompt=6, max_tokens=8, ignore_eos=True)
    house.step(2)
    check_laws(house.core)
    return house


def pin_of(house):
    return house.core.book.pins.get(RequestId("P")).request


def lose_a_token_of_a_pin(house):
    pin_of(house).sequences[0].table.num_filled -= 1


def swap_a_pin_out(house):
    core, request = house.core, pin_of(house)
    core.steps.holdings.swap_out(request, 0)
    core.steps.holdings.settle(None)
    core.book.pinned.remove(request)
    request.status = Status.SWAPPED
    core.book.swapped.add(request)


def let_a_pin_give_way(house):
    pin_of(house).is_protected = False


def pin_more_than_the_share(house):
    pin = Pin(RequestId("Q"), (7,) * 21)  # six blocks beside three, of which eight are allowed
    house.core.book.pin(Prefix(pin, house.core.book.get("A").gateway, SequenceId(99)))


def promise_more_than_is_left(house):
    house.core.book.get("A").limit(13 * 4)  # with six tokens before it


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (lose_a_token_of_a_pin, "pins, all of it is held: 9 tokens of P"),
        (swap_a_pin_out, "pins, never swapped or over: P is swapped"),
        (let_a_pin_give_way, "pins, give way to nobody: P"),
        (pin_more_than_the_share, "pins, the budget: 9 blocks are kept, at most 8"),
        (promise_more_than_is_left, "pins, everybody fits beside them: A may need 15, 3 of 16"),
    ],
)  # fmt: skip
def test_a_fault_of_pins_is_told_by_the_law_it_breaks(beside_a_pin, fault, law):
    fault(beside_a_pin)
    with pytest.raises(InvariantBroken, match=law):
        check_laws(beside_a_pin.core)
