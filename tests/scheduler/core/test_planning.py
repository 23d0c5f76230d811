"""What a step computes: chunks, the budget, who starts, who gives way."""

import pytest

from services.scheduler.core.book import Book
from services.scheduler.core.costs import MachineCosts
from services.scheduler.core.counters import Counters
from services.scheduler.core.decoding import Sample as SampleOnce
from services.scheduler.core.events import Gateway
from services.scheduler.core.giving_way import GivingWay
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.lifecycle import Change, Status
from services.scheduler.core.planner import Planner
from services.scheduler.core.policies.batching import Mixed
from services.scheduler.core.policies.order import Fcfs
from services.scheduler.core.policies.preemption import LatestFirst, Recompute
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.ids import RequestId, SequenceId
from shared.messages import Costs, PreemptionMode, Sample, Submit
from shared.sampling import DrawParams, FinishReason, SamplingParams
from tests.scheduler.core.house import BOOT

RECOMPUTE = PreemptionMode.RECOMPUTE


def preempted(house, name):
    """Whether the newest plan says that this one gave way."""
    told = {preemption.sequence_id for preemption in house.plans[-1].preemptions}
    return house.sequence(name).sequence_id in told


# ------------------------------------------------------------------ rows and chunks


def test_an_idle_scheduler_plans_at_once_and_then_after_each_result(house):
    house.submit("A", prompt=5, max_tokens=3, ignore_eos=True)
    assert house.rows() == {"A": (0, 5, 1)}
    house.step()
    assert house.rows() == {"A": (5, 1, 1)}
    house.step()
    assert house.rows() == {"A": (6, 1, 1)}
    house.step()
    assert (len(house.plans), house.in_flight) == (3, [])
    assert house.finish("A") is FinishReason.LENGTH


def test_one_plan_is_in_flight_whatever_arrives(house):
    for name in "ABC":
        house.submit(name)
        house.tick()
    assert len(house.plans) == 1
    house.step()
    assert set(house.rows()) == {"A", "B", "C"}


def test_the_last_sampled_token_is_never_computed(house):
    house.submit("A", prompt=5, max_tokens=3, ignore_eos=True)
    house.run()
    assert house.core.counters.computed_tokens == 5 + 3 - 1


def test_a_long_prompt_comes_in_chunks_and_only_the_last_one_samples(build):
    house = build(max_num_batched_tokens=4)
    house.submit("A", prompt=10, max_tokens=2, ignore_eos=True)
    rows = [house.rows()]
    for _ in range(3):
        house.step()
        rows.append(house.rows())
    assert rows == [{"A": (0, 4, 0)}, {"A": (4, 4, 0)}, {"A": (8, 2, 1)}, {"A": (10, 1, 1)}]
    house.run()
    assert house.tokens("A") == house.solo("A")


def test_blocks_are_handed_out_chunk_by_chunk(build):
    house = build(block_size=4, max_num_batched_tokens=6)
    house.submit("A", prompt=16, max_tokens=1)
    assert house.table("A") == ((0, 4), (1, 2))
    house.step()
    assert house.table("A") == ((0, 4), (1, 4), (2, 4))


def test_decodes_come_first_and_prompts_share_the_rest(build):
    house = build(max_num_batched_tokens=8)
    house.submit("A", prompt=3, max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("B", prompt=20, max_tokens=2, ignore_eos=True)
    house.submit("C", prompt=20, max_tokens=2, ignore_eos=True)
    house.step()
    assert house.rows() == {"A": (4, 1, 1), "B": (0, 7, 0)}
    house.step(2)
    assert house.rows() == {"A": (6, 1, 1), "B": (14, 6, 1), "C": (0, 1, 0)}
    newest = house.plans[-1].rows
    assert [len(row.token_ids) for row in newest] == [1, 6, 1]  # the decode stands first
    house.step()
    assert house.rows() == {"A": (7, 1, 1), "B": (20, 1, 1), "C": (1, 6, 0)}
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_more_sequences_than_budget_never_run_so_every_one_goes_on_every_step(build):
    house = build(num_blocks=64, max_num_batched_tokens=3, max_num_seqs=9)
    for name in "ABCDE":
        house.submit(name, prompt=1, max_tokens=6, ignore_eos=True)
    house.step()
    assert set(house.rows()) == {"A", "B", "C"}
    assert house.core.num_running == 3
    house.run()
    for name in "ABCDE":
        assert house.tokens(name) == house.solo(name)


def test_max_num_seqs_bounds_who_runs(build):
    house = build(num_blocks=64, max_num_seqs=2)
    for name in "ABC":
        house.submit(name, prompt=3, max_tokens=4, ignore_eos=True)
    house.step()
    assert [house.status(name) for name in "ABC"] == [
        Status.RUNNING, Status.RUNNING, Status.WAITING,
    ]  # fmt: skip
    assert (house.core.num_running, house.core.num_waiting, house.core.num_swapped) == (2, 1, 0)
    house.run()
    assert house.tokens("C") == house.solo("C")


def test_a_row_says_how_to_draw(house):
    draw = DrawParams(temperature=0.7, top_k=5)
    house.submit("A", prompt=4, max_tokens=3, draw=draw, seed=11, ignore_eos=True)
    row = house.plans[-1].rows[0]
    assert row.samples == (Sample(row.sequence_id, 0, 11, draw),)


# ------------------------------------------------------------------ admission


def test_admission_wants_blocks_for_the_whole_prompt(build):
    house = build(num_blocks=6, block_size=4, max_num_batched_tokens=8)
    house.submit("A", prompt=10, max_tokens=3, ignore_eos=True)
    house.step()
    house.submit("B", prompt=16, max_tokens=2, ignore_eos=True)  # 4 of 3 free blocks
    house.step()
    assert house.status("B") is Status.WAITING
    house.run()
    assert house.tokens("B") == house.solo("B")
    assert house.core.counters.preemptions[RECOMPUTE] == 0


def test_blocks_not_yet_handed_out_to_an_admitted_prompt_are_not_promised_twice(build):
    house = build(num_blocks=8, block_size=4, max_num_batched_tokens=5)
    house.submit("A", prompt=17, max_tokens=2, ignore_eos=True)  # 5 blocks, 2 of them at once
    house.submit("B", prompt=16, max_tokens=2, ignore_eos=True)  # 4: not beside A
    house.submit("C", prompt=3, max_tokens=2, ignore_eos=True)  # behind B, though it would fit
    house.step(3)
    assert house.rows()["A"] == (15, 2, 1)  # 3 tokens of budget are left, and 3 blocks
    assert [house.status(name) for name in "BC"] == [Status.WAITING, Status.WAITING]
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


class SmallChunks(Mixed):
    """No prompt takes more than two tokens a step, so several prompts are under way at once."""

    def open(self, running):
        shares = super().open(running)
        grant_all = shares.grant_new

        def grant_two(sequence):
            granted = grant_all(sequence)
            shares.left += granted - min(granted, 2)
            return min(granted, 2)

        shares.grant_new = grant_two
        return shares


def test_promises_hold_under_a_policy_that_leaves_prompts_half_done():
    """Eight blocks; A is promised five and has one. B wants four: not yet. Policies plug in."""
    book, allocator = Book(Fcfs()), PagedAllocator(BlockPool(8), 4)
    holdings, counters = Holdings(allocator), Counters()
    giving_way = GivingWay(
        book=book, holdings=holdings, costs=MachineCosts(Costs(64, 0.0, 0.0), counters),
        victim=LatestFirst(), preemption=Recompute(), counters=counters,
    )  # fmt: skip
    planner = Planner(
        boot=BOOT, book=book, holdings=holdings, batching=SmallChunks(64), giving_way=giving_way,
        counters=counters, max_running=9, max_scored_tokens=9, watermark=0.0,
    )  # fmt: skip
    for at, (name, prompt) in enumerate((("A", 17), ("B", 16), ("C", 3))):
        params = SamplingParams(max_tokens=2)
        ids = (1,) * prompt
        book.add(
            Request(
                Submit(RequestId(name), ids, params), gateway=Gateway(b"g"), arrival=float(at),
                max_tokens=2, decoding=SampleOnce(params, ()),
                sequences=(Sequence(SequenceId(at), 0, ids),),
            )
        )  # fmt: skip
    planner.plan(1)
    assert [request.request_id for request in book.running] == ["A"]
    book.change(book.waiting.first, Change.END)  # B leaves
    planner.plan(2)
    assert [request.request_id for request in book.running] == ["A", "C"]


def test_first_come_first_served_even_if_a_later_one_would_fit(build):
    house = build(num_blocks=6, block_size=4)
    house.submit("A", prompt=12, max_tokens=4, ignore_eos=True)
    house.submit("B", prompt=20, max_tokens=2, ignore_eos=True)
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True)
    house.step()
    assert [house.status(name) for name in "ABC"] == [
        Status.RUNNING, Status.WAITING, Status.WAITING,
    ]  # fmt: skip


def test_a_start_leaves_the_watermark_free_for_those_who_go_on(build):
    house = build(num_blocks=10, block_size=4, watermark=0.2)
    house.submit("A", prompt=4, max_tokens=3, ignore_eos=True)
    house.step()
    house.submit("B", prompt=28, max_tokens=2, ignore_eos=True)  # 7 of 8 free, 2 must stay
    house.step()
    assert house.status("B") is Status.WAITING
    house.step()  # A is over; nothing runs, so there is nobody to leave blocks for
    assert house.status("B") is Status.RUNNING


def test_no_watermark_when_nothing_runs(build):
    house = build(num_blocks=4, block_size=4, watermark=0.5)
    house.submit("A", prompt=16, max_tokens=1)
    assert house.rows() == {"A": (0, 16, 1)}


def test_age_restores_the_place_in_the_line(build):
    house = build(max_num_seqs=1)
    house.submit("A", prompt=3, max_tokens=2, ignore_eos=True)
    house.submit("B", prompt=3, max_tokens=2, ignore_eos=True)
    house.submit("C", prompt=3, max_tokens=2, ignore_eos=True, age_s=50.0)
    house.step(2)
    assert (house.status("A"), house.status("C")) == (Status.FINISHED, Status.RUNNING)
    assert house.status("B") is Status.WAITING


# ------------------------------------------------------------------ giving way


def test_the_latest_gives_way_and_the_oldest_goes_on_in_the_same_step(build):
    """Nobody else has anything to compute, so the round in which B gave way is no plan."""
    house = build(num_blocks=4, block_size=4)
    house.submit("A", prompt=6, max_tokens=5, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    house.step(2)
    assert house.rows() == {"A": (7, 1, 1), "B": (7, 1, 1)}
    assert house.free == 0
    house.step()  # A needs a third block
    assert preempted(house, "B")
    assert house.rows() == {"A": (8, 1, 1)}
    assert [house.status(name) for name in "AB"] == [Status.RUNNING, Status.WAITING]
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_nobody_starts_in_a_step_in_which_somebody_gave_way(build):
    """W is older than all and would fit in what is left of B's blocks; it starts a step later."""
    house = build(num_blocks=4, block_size=4)
    house.submit("A", prompt=6, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=5, ignore_eos=True)
    house.step(2)
    house.submit("W", prompt=2, max_tokens=2, ignore_eos=True, age_s=50.0)
    house.step()
    assert preempted(house, "B")
    assert (set(house.rows()), house.free) == ({"A"}, 1)
    house.step()
    assert set(house.rows()) == {"A", "W"}
    house.run()
    for name in "ABW":
        assert house.tokens(name) == house.solo(name)


def test_who_gives_way_loses_all_blocks_and_waits_at_its_place(build):
    house = build(num_blocks=5, block_size=4)
    house.submit("A", prompt=8, max_tokens=9, ignore_eos=True)
    house.submit("B", prompt=7, max_tokens=9, ignore_eos=True)
    house.step(2)
    assert (house.table("A"), house.table("B")) == (
        ((0, 4), (1, 4), (2, 2)), ((3, 4), (4, 4)),
    )  # fmt: skip
    generated = house.tokens("B")
    house.step()  # B needs a third block; none is free; B is the latest: it gives way itself
    assert preempted(house, "B")
    assert (house.status("B"), house.sequence("B").table) == (Status.WAITING, None)
    assert set(house.rows()) == {"A"}
    assert house.free == 2
    house.submit("C", prompt=2, max_tokens=1)
    house.step()
    assert house.status("C") is Status.WAITING  # behind B, which came before
    while house.status("B") is Status.WAITING:
        house.step()
    told = house.rows()["B"]
    assert told == (0, 7 + len(generated) + 1, 1)  # prompt and answer came back as one prompt
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_a_request_that_asks_in_vain_sits_out_and_gets_the_block_in_the_next_step(build):
    """Law 9: what gives way in a step settles first. C goes on meanwhile."""
    house = build(num_blocks=6, block_size=4)
    house.submit("A", prompt=6, max_tokens=12, ignore_eos=True)
    house.submit("B", prompt=4, max_tokens=12, ignore_eos=True)
    house.submit("C", prompt=7, max_tokens=9, ignore_eos=True)
    house.step()
    assert [house.status(name) for name in "ABC"] == [Status.RUNNING] * 3
    victims_blocks = None
    while not house.plans[-1].preemptions:
        victims_blocks = {block for block, _ in house.table("C")}
        house.step()
    assert preempted(house, "C")
    assert set(house.rows()) == {"B"}  # A asked, C gave way, B needed nothing
    assert not victims_blocks.intersection(house.plans[-1].rows[0].block_table)
    house.step()
    assert house.rows().keys() == {"A", "B"}
    assert victims_blocks.intersection(house.plans[-1].rows[0].block_table)
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_one_victim_is_enough_for_two_who_ask_if_it_has_two_blocks(build):
    house = build(num_blocks=6, block_size=4, join=False)
    for name in "ABC":
        house.submit(name, prompt=7, max_tokens=9, ignore_eos=True)
    house.join()  # all three start in one step
    house.step()
    assert house.free == 0
    house.step()  # all three need a third block
    assert len(house.plans[-1].preemptions) == 1
    assert preempted(house, "C")
    assert set(house.rows()) == {"A", "B"}
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_a_settling_block_is_spoken_for_by_one_who_asks_and_the_next_needs_another_victim(build):
    house = build(num_blocks=8, block_size=4, join=False)
    for name, prompt in zip("ABCDE", (6, 8, 8, 2, 2), strict=True):
        house.submit(name, prompt=prompt, max_tokens=8, ignore_eos=True)
    house.join()
    assert house.free == 0
    house.step()  # B and C need a third block each; D and E have one each
    assert (preempted(house, "D"), preempted(house, "E")) == (True, True)
    assert set(house.rows()) == {"A"}
    house.step()
    assert set(house.rows()) == {"A", "B", "C"}
    house.run()
    for name in "ABCDE":
        assert house.tokens(name) == house.solo(name)


@pytest.mark.parametrize("max_num_batched_tokens", [512, 7])
def test_r2_two_requests_that_fit_alone_but_not_together(build, max_num_batched_tokens):
    """Block 16, 7 blocks, two prompts of 34 and 35 tokens more: each needs 5 blocks."""
    house = build(7, 16, max_num_batched_tokens=max_num_batched_tokens)
    for name in "AB":
        house.submit(name, prompt=34, max_tokens=35, ignore_eos=True)
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)
        assert len(house.tokens(name)) == 35
    assert house.core.counters.preemptions[RECOMPUTE] >= 1
    assert house.free == 7


def test_the_oldest_running_request_goes_on_in_nearly_every_step(build):
    """It sits out only when it asked in vain; so six requests in five blocks all come to an end."""
    house = build(5, 2)
    for name in "ABCDEF":
        house.submit(name, prompt=4, max_tokens=6, ignore_eos=True)
    last = 0
    while house.in_flight:
        oldest = house.core.book.running.first.sequences[0]
        before = oldest.num_computed
        house.step(1)
        sat_out = house.in_flight and oldest.sequence_id not in {
            row.sequence_id for row in house.plans[-1].rows
        }
        last = last + 1 if sat_out and oldest.finish is None else 0
        assert last <= 1
        assert oldest.finish is not None or oldest.num_computed >= before
    for name in "ABCDEF":
        assert house.tokens(name) == house.solo(name)


def test_an_admitted_prompt_whose_promised_blocks_were_eaten_gives_way(build):
    """Promises hold back other starts, not those who run: a decode may eat them."""
    house = build(num_blocks=6, block_size=2, max_num_batched_tokens=3)
    house.submit("A", prompt=2, max_tokens=11, ignore_eos=True)
    house.step()
    house.submit("B", prompt=8, max_tokens=2, ignore_eos=True)
    house.run()
    assert house.core.counters.preemptions[RECOMPUTE] >= 1
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_preemption_counts_no_tokens_twice_but_computes_them_twice(build):
    house = build(7, 16)
    for name in "AB":
        house.submit(name, prompt=34, max_tokens=35, ignore_eos=True)
    house.run()
    counters = house.core.counters
    assert counters.tokens() == (68, 70)
    assert counters.computed_tokens > 68 + 70 - 2


@pytest.mark.parametrize(("generated", "ahead", "wanted"), [(0, 0, 5), (2, 0, 7), (2, 1, 7)])
def test_the_last_token_of_an_answer_wants_no_place(house, generated, ahead, wanted):
    """Of 5 + 3 tokens the eighth is never computed, drawn or in flight."""
    house.submit("A", prompt=5, max_tokens=3, ignore_eos=True)
    sequence = house.sequence("A")
    house.lose_executor()
    sequence.generated, sequence.ahead = [1] * generated, ahead
    assert (sequence.num_wanted, sequence.num_to_compute) == (wanted, wanted)
    sequence.generated, sequence.ahead = [], 0
    house.join()
    house.run()
    assert house.core.usage().num_free == 16


def test_a_grant_that_is_given_back_is_for_others():
    shares = Mixed(10).open([1, 1, 20, 20])
    assert [shares.grant(1), shares.grant(20), shares.grant(20)] == [1, 8, 0]
    shares.give_back(8)
    assert shares.grant(20) == 8
    shares.give_back(1)
    assert shares.grant_new(5) == 1


def test_the_token_of_a_decode_that_finds_no_block_goes_to_a_prompt(build):
    """A waits for a block; who came back and may not give way computes four tokens, not three."""
    house = build(
        12, 2, preemption_mode="recompute", max_num_batched_tokens=4, watermark=0.0,
    )  # fmt: skip
    for name, prompt, max_tokens in (("A", 2, 11), ("B", 9, 11), ("C", 8, 7)):
        house.submit(name, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    lonely = []
    while house.in_flight:
        (row, *others), num_running = house.plans[-1].rows or [None], house.core.num_running
        if row is not None and not others and num_running > 1:
            lonely.append(len(row.token_ids))
        house.step()
    assert 4 in lonely, lonely
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)
