"""The blocks of beams: forked and freed as in figure 9, shared again by whoever comes back."""

from collections import Counter

import pytest

from services.scheduler.core.beams import Beams
from services.scheduler.core.book import Book
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.decoding import decoding_of
from services.scheduler.core.events import Gateway
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.policies.order import Fcfs
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.steps import Steps
from services.scheduler.core.streams import Outbox, Streams
from shared.geometry import ModelShape
from shared.ids import Boot, RequestId, SequenceId
from shared.messages import Costs, ExecutorReady, PositionLogprobs, PreemptionMode, Submit
from shared.sampling import NO_DRAW, SamplingParams
from tests.scheduler.core.test_beams import beams

# ------------------------------------------------------------------ figure 9


class Blocks:
    """The parts of a scheduler that beams need to change their blocks, and no more."""

    def __init__(self, num_blocks, block_size):
        counters = Counters()
        self.steps = Steps(SchedulerConfig(Boot(1)), Book(Fcfs()), counters)
        shape = ModelShape(1, 1, 1, 2, 2, 40, 256)
        self.steps.join(
            ExecutorReady(
                Boot(2), "toy", shape, block_size, num_blocks, 0, 256, (), "int32", Costs(1, 0, 0)
            )
        )
        self.allocator = self.steps.holdings.allocator
        streams = Streams(Outbox(), counters)
        self.beams = Beams(self.steps, streams, counters, map(SequenceId, range(1, 99)))

    def search(self, width, max_tokens):
        params = SamplingParams(
            n=width, max_tokens=max_tokens, use_beam_search=True, draw=NO_DRAW, ignore_eos=True
        )
        request = Request(
            Submit(RequestId("A"), (1, 2, 3, 4), params),
            gateway=Gateway(b"g"), arrival=0.0, max_tokens=max_tokens,
            decoding=decoding_of(params, (), 40),
            sequences=tuple(Sequence(SequenceId(900 + at), at, (1,)) for at in range(width)),
        )  # fmt: skip
        self.beams.begin(request)
        return request

    def report(self, request, *tops):
        """Each beam's likeliest tokens; then the search goes on."""
        for beam, top in zip(request.beams, tops, strict=True):
            beam.report = PositionLogprobs(top[0], 1, tuple(range(len(top))), tuple(top))
        assert self.beams.expand(request) == []

    def grow(self, beam, num_places=4):
        return self.allocator.append(beam.table, num_places).copies


def test_figure_9_beams_that_fall_behind_free_their_blocks_and_the_others_fork():
    """Width 4: the next four all come from candidates 1 and 2, so 0 and 3 give theirs back."""
    blocks = Blocks(13, 4)
    request = blocks.search(width=4, max_tokens=99)
    blocks.report(request, (-1, -1, -1, -1))
    candidates, pool = request.beams, blocks.allocator.pool
    one, two, three, four = candidates
    one.table = blocks.allocator.start()
    blocks.grow(one)  # block 0, the prompt
    four.table = blocks.allocator.fork(one.table)
    for beam in (one, four, one, four):
        blocks.grow(beam)
    for beam in (two, three):
        beam.table = blocks.allocator.fork(one.table)
    for beam in candidates:
        blocks.grow(beam)
    assert [beam.table.block_ids for beam in candidates] == [
        [0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8],
    ]  # fmt: skip
    assert [pool.ref_count(block) for block in (0, 1, 3)] == [4, 3, 3]

    blocks.report(request, (-9,) * 4, (-1, -1, -9, -9), (-2, -2, -9, -9), (-9,) * 4)
    assert [blocks.grow(beam) for beam in request.beams] == [()] * 4
    assert [beam.table.block_ids for beam in request.beams] == [
        [0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12],
    ]  # fmt: skip
    assert request.beams[0] is two
    assert request.beams[2] is three
    assert [pool.ref_count(block) for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert (one.table, four.table) == (None, None)
    pool.settle()
    assert sorted(pool.free_blocks) == [2, 4, 5, 8]
    usage = blocks.allocator.usage()
    assert (usage.num_logical, usage.num_different) == (20, 9)
    assert usage.sharing_saved == pytest.approx(11 / 20)


# ------------------------------------------------------------------ coming back


def whole_blocks(texts, size):
    """How many texts begin with each beginning that fills blocks of so many places."""
    return Counter(text[:end] for text in texts for end in range(size, len(text) + 1, size))


def texts_of(house, name):
    return [(*beam.prompt, *beam.generated) for beam in house.core.book.get(name).beams]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}, {"plans_in_flight": 2}])
@pytest.mark.parametrize("prompt", [3, 8, 9])
def test_what_beams_have_in_common_is_computed_once_when_they_come_back(build, settings, prompt):
    house = build(64, 4, **settings)
    beams(house, "A", prompt=prompt, max_tokens=30, n=4)
    request = house.core.book.get("A")
    while len(request.beams[0].generated) < 21:
        house.step()
    texts, counters = texts_of(house, "A"), house.core.counters
    shared = whole_blocks(texts, 4)
    assert max(count for text, count in shared.items() if len(text) > prompt) > 1
    house.lose_executor()
    before, checked = counters.computed_tokens, 0
    house.join()
    while texts_of(house, "A") == texts:
        checked += check_sharing(request, texts, shared)
        house.step()
    assert checked
    tails = sum(len(text) % 4 for text in texts)
    to_come = sum(len(row.token_ids) for plan in house.in_flight for row in plan.rows)
    assert counters.computed_tokens - before - to_come == 4 * len(shared) + tails
    house.run()
    assert house.answers("A") == house.solos("A")


def check_sharing(request, texts, shared):
    """Every full block has as many owners as texts begin with it, once all beams have tables."""
    tables = [beam.table for beam in request.beams]
    if any(table is None for table in tables):
        return False
    for text, table in zip(texts, tables, strict=True):
        for at in range(table.num_filled // 4):
            owners = [one for one in tables if table.block_ids[at] in one.block_ids]
            assert len(owners) == shared[text[: 4 * at + 4]]
    return True


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_the_same_texts_through_giving_way(build, mode, cache, plans_in_flight):
    house = build(
        18, 4, num_cpu_blocks=40, preemption_mode=mode, enable_prefix_caching=cache,
        plans_in_flight=plans_in_flight, watermark=0.0,
    )  # fmt: skip
    for at, name in enumerate("ABC"):
        beams(house, name, prompt=9, max_tokens=14, n=3, length_penalty=float(at))
    house.submit("D", prompt=9, max_tokens=14, n=2)
    searches = [house.core.book.get(name) for name in "ABC"]
    gave_way = set()
    while house.in_flight:
        house.step()
        told = {told.sequence_id for told in house.plans[-1].preemptions}
        gave_way |= {
            request.request_id
            for request in searches
            for beam in request.beams
            if beam.sequence_id in told and beam.generated
        }
    assert gave_way
    assert house.core.counters.preemptions[PreemptionMode(mode)] > 0
    for name in "ABCD":
        assert house.answers(name) == house.solos(name)


def full_blocks(tables):
    """Which full blocks of these tables are the same, whatever their ids."""
    numbers = {}
    return [
        [numbers.setdefault(block, len(numbers)) for block in table.block_ids[: filled // 4]]
        for table, filled in tables
    ]


def test_swapped_beams_come_back_sharing_what_they_shared(build):
    house = build(16, 4, num_cpu_blocks=32, preemption_mode="swap", watermark=0.0)
    house.submit("A", prompt=21, max_tokens=30, ignore_eos=True)
    beams(house, "B", prompt=9, max_tokens=12, n=4)
    request = house.core.book.get("B")
    while house.status("B") is not Status.SWAPPED:
        house.step()
    swapped = [(beam.swapped, beam.swapped.num_filled) for beam in request.beams]
    out, there = house.plans[-1].swap_out, full_blocks(swapped)
    assert len(out) == len({block for table, _ in swapped for block in table.block_ids})
    assert len(out) < sum(len(table) for table, _ in swapped)  # each moves once
    while house.status("B") is Status.SWAPPED:
        house.step()
    assert len(house.plans[-1].swap_in) == len(out)
    back = full_blocks([(beam.table, len(there[0]) * 4) for beam in request.beams])
    assert back == there
    assert max(max(row) for row in back) > len(back[0]) - 1  # and some of them are their own
    house.run()
    assert house.core.counters.preemptions[PreemptionMode.SWAP] > 0
    assert house.answers("A") == house.solos("A")
    assert house.answers("B") == house.solos("B")


def test_beams_that_are_moved_out_while_their_reports_come_fork_where_they_are(build):
    """Two plans in flight: the second moves the blocks, and then the first tells what is next."""
    house = build(
        16, 4, num_cpu_blocks=32, preemption_mode="swap", plans_in_flight=2, watermark=0.0,
    )  # fmt: skip
    house.submit("A", prompt=24, max_tokens=30, ignore_eos=True)
    beams(house, "B", prompt=9, max_tokens=12, n=4)
    request, forked = house.core.book.get("B"), 0
    while request.beams:
        was_swapped, texts = house.status("B") is Status.SWAPPED, texts_of(house, "B")
        house.step()
        is_swapped = house.status("B") is Status.SWAPPED
        forked += was_swapped and is_swapped and texts_of(house, "B") not in ([], texts)
    assert forked > 0
    house.run()
    assert house.answers("A") == house.solos("A")
    assert house.answers("B") == house.solos("B")


@pytest.mark.parametrize("lost_at", range(1, 10))
def test_an_executor_lost_at_any_step_of_a_search_changes_nothing(build, lost_at):
    house = build(64, 4, max_num_batched_tokens=7, enable_prefix_caching=lost_at % 2 == 0)
    beams(house, "A", prompt=9, max_tokens=8, n=4)
    house.step(lost_at)
    house.lose_executor()
    house.join(block_size=(4, 3)[lost_at % 2])
    house.run()
    assert house.core.counters.executor_losses == 1
    assert house.answers("A") == house.solos("A")


@pytest.mark.parametrize("again_at", [4, 5])
def test_an_executor_lost_while_only_some_beams_are_back_takes_their_reports_too(build, again_at):
    house = build(64, 4, max_num_batched_tokens=5)
    beams(house, "A", prompt=9, max_tokens=12, n=4)
    house.step(9)
    house.lose_executor()
    house.join()
    house.step(again_at)
    reported = [beam.report is not None for beam in house.core.book.get("A").beams]
    assert any(reported)
    assert not all(reported)
    house.lose_executor()
    assert not any(beam.report for beam in house.core.book.get("A").beams)
    house.join()
    house.run()
    assert house.answers("A") == house.solos("A")


def test_whoever_kills_executors_with_its_beams_is_found(build):
    house = build(64, 4)
    beams(house, "A", prompt=9, max_tokens=8, n=4)
    house.step(3)
    for _ in range(2):
        house.lose_executor()
        house.join()
    request, text = house.core.book.get("A"), texts_of(house, "A")
    assert request.is_suspect
    while texts_of(house, "A") == text:
        house.step()
    assert request.num_losses == 0  # it got further
    house.run()
    assert house.answers("A") == house.solos("A")


# ------------------------------------------------------------------ beside pins and bills


@pytest.mark.parametrize("cache", [True, False])
def test_beams_start_on_a_pinned_prefix_and_copy_its_last_block(build, cache):
    house = build(32, 4, enable_prefix_caching=cache)
    prefix = tuple(range(1, 11))  # two blocks of four and a half
    house.pin("P", prefix)
    house.run()
    pinned = [block for block, _ in house.pin_table("P")]
    beams(house, "A", prompt=(*prefix, 31), max_tokens=6, n=3)
    assert [move.source for move in house.plans[-1].copies] == pinned[2:]
    house.step(2)
    assert [house.ref_count(block) for block in pinned] == [4, 4, 1]
    house.lose_executor()
    house.join()
    house.run()
    assert house.answers("A") == house.solos("A")
    assert house.stream("A", index=2).finished.usage.cached_tokens == 10
    house.unpin("P")


def test_beams_are_billed_for_the_blocks_they_hold(build):
    house = build(64, 4, enable_kv_bill=True)
    beams(house, "A", prompt=9, max_tokens=10, n=4)
    request, held = house.core.book.get("A"), []
    while request.beams:
        tables = [beam.table.block_ids for beam in request.beams]
        held.append((len(set().union(*tables)), sum(map(len, tables))))
        house.step()
    bill = house.stream("A", index=3).finished.usage.bill
    assert bill.peak_blocks == max(used for used, _ in held)
    assert bill.peak_saved_blocks == max(alone - used for used, alone in held)
    used, alone = map(sum, zip(*held, strict=True))
    assert bill.sharing_saved == pytest.approx((alone - used) / alone)
    assert bill.sharing_saved > 0.3
    assert bill.copied_blocks == house.core.counters.cow_copies > 0
