"""Blocks: handed out, shared, copied on write, given back; the paper's figures to the number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.kv.usage import KVUsage
from shared.errors import InvariantBroken
from shared.geometry import blocks_in
from shared.messages import Move


def an_allocator(num_blocks=8, block_size=4, free_order=None):
    return PagedAllocator(BlockPool(num_blocks, free_order), block_size)


# ------------------------------------------------------------------ the paper's figures


def test_figure_6_one_request_through_its_block_table():
    """ "Four score and seven years ago our" has 7 tokens; then "fathers", then "brought"."""
    allocator = an_allocator(free_order=[7, 1, 3, 0, 2, 4, 5, 6])
    table = allocator.start()
    allocator.append(table, 7)
    assert table.entries() == ((7, 4), (1, 3))
    allocator.append(table, 1)
    assert table.entries() == ((7, 4), (1, 4))
    allocator.append(table, 1)
    assert table.entries() == ((7, 4), (1, 4), (3, 1))


def test_figure_7_two_requests_side_by_side():
    """A's blocks are 7, 1 and then 3; B ("It was the best of") has 5 and 2."""
    allocator = an_allocator(free_order=[7, 1, 5, 2, 3, 0, 4, 6])
    first, second = allocator.start(), allocator.start()
    allocator.append(first, 7)
    allocator.append(second, 5)
    assert (first.entries(), second.entries()) == (((7, 4), (1, 3)), ((5, 4), (2, 1)))
    for _ in range(2):
        allocator.append(first, 1)
        allocator.append(second, 1)
    assert first.entries() == ((7, 4), (1, 4), (3, 1))
    assert second.entries() == ((5, 4), (2, 3))


def test_figures_6_and_7_as_the_scheduler_plans_them(build):
    house = build(8, 4, free_order=[7, 1, 5, 2, 3, 0, 4, 6])
    house.submit("A", prompt=7, max_tokens=3, ignore_eos=True)
    assert house.table("A") == ((7, 4), (1, 3))
    house.submit("B", prompt=5, max_tokens=4, ignore_eos=True)
    house.step()  # A has "fathers"; B starts beside it
    assert (house.table("A"), house.table("B")) == (((7, 4), (1, 4)), ((5, 4), (2, 1)))
    house.step()  # A has "brought" and takes a third block
    assert (house.table("A"), house.table("B")) == (((7, 4), (1, 4), (3, 1)), ((5, 4), (2, 2)))


def test_figure_8_the_writer_of_a_shared_block_copies_it_first():
    allocator = an_allocator(free_order=[7, 1, 3, 0, 2, 4, 5, 6])
    first = allocator.start()
    allocator.append(first, 7)
    second = allocator.fork(first)
    assert [allocator.pool.ref_count(block) for block in (7, 1)] == [2, 2]
    placed, copies = allocator.append(first, 1)
    assert (placed, copies) == (1, (Move(1, 3),))
    assert first.entries() == ((7, 4), (3, 4))
    assert second.entries() == ((7, 4), (1, 3))
    assert [allocator.pool.ref_count(block) for block in (7, 1, 3)] == [2, 1, 1]
    assert allocator.append(second, 1) == (1, ())  # the last owner writes in place


def test_a_full_shared_block_is_never_copied():
    allocator = an_allocator()
    first = allocator.start()
    allocator.append(first, 8)
    second = allocator.fork(first)
    assert allocator.append(first, 1).copies == ()
    assert allocator.append(second, 1).copies == ()
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]


def test_a_copy_that_finds_no_block_places_nothing_and_changes_nothing():
    allocator = an_allocator(num_blocks=1)
    first = allocator.start()
    allocator.append(first, 2)
    second = allocator.fork(first)
    assert allocator.append(second, 1) == (0, ())
    assert first.entries() == second.entries() == ((0, 2),)
    assert allocator.pool.ref_count(first.block_ids[0]) == 2


# ------------------------------------------------------------------ pool


def test_a_block_freed_while_planning_is_not_handed_out_before_it_settles():
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    assert (pool.num_available, pool.settling_blocks, pool.free_blocks) == (0, (block,), ())
    with pytest.raises(InvariantBroken, match="1 of 1 are settling"):
        pool.take()
    pool.settle()
    assert pool.take() == block


def test_the_block_freed_last_is_handed_out_first():
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for block in (2, 0, 3):
        pool.release(block)
    pool.settle()
    assert pool.free_blocks == (3, 0, 2)
    assert [pool.take() for _ in range(3)] == [3, 0, 2]


def test_a_table_given_back_is_handed_out_again_in_its_own_order():
    allocator = an_allocator()
    table = allocator.start()
    allocator.append(table, 12)
    before = list(table.block_ids)
    allocator.free(table)
    allocator.pool.settle()
    again = allocator.start()
    allocator.append(again, 12)
    assert again.block_ids == before


def test_misuse_of_the_pool_is_our_bug_and_says_so():
    pool = BlockPool(2)
    with pytest.raises(InvariantBroken, match="freed twice"):
        pool.release(0)
    with pytest.raises(InvariantBroken, match="is free and cannot be shared"):
        pool.share(0)
    with pytest.raises(InvariantBroken, match="free_order"):
        BlockPool(2, [0, 0])
    allocator = an_allocator()
    table = allocator.start()
    allocator.free(table)
    with pytest.raises(InvariantBroken, match="freed twice"):
        allocator.free(table)


# ------------------------------------------------------------------ table


def test_a_block_is_added_only_when_all_earlier_ones_are_full():
    table = BlockTable(4)
    table.add(3)
    table.fill(3)
    with pytest.raises(InvariantBroken, match="1 empty places"):
        table.add(5)
    with pytest.raises(InvariantBroken, match="2 places of 1 empty"):
        table.fill(2)
    table.fill(1)
    table.add(5)
    assert table.entries() == ((3, 4), (5, 0))
    with pytest.raises(InvariantBroken, match="logical block 2"):
        table.filled(2)


def test_append_places_what_it_can():
    allocator = an_allocator(num_blocks=2, block_size=4)
    table = allocator.start()
    assert allocator.append(table, 0).num_places == 0
    assert allocator.append(table, 20).num_places == 8
    assert allocator.append(table, 1).num_places == 0
    assert table.entries() == ((0, 4), (1, 4))


def test_usage_counts_shared_places_once():
    allocator = an_allocator(num_blocks=8, block_size=4)
    first = allocator.start()
    allocator.append(first, 6)
    second = allocator.fork(first)
    allocator.append(second, 1)
    assert allocator.usage() == KVUsage(
        4, 8, num_free=5, num_shared=1, tokens=4 + 2 + 3, internal=3, num_logical=4, num_different=3
    )
    assert allocator.usage().sharing_saved == 1 / 4
    assert allocator.usage().num_used == 3
    assert allocator.usage().used_share == 3 / 8
    assert KVUsage(1, 0, 0, 0, 0).used_share == 0.0


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["start", "append", "fork", "free"]), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_any_tables_hold_what_a_plain_model_of_copies_says(block_size, moves):
    """Each table remembers its own tokens; the store of places must agree, copies included."""
    allocator = an_allocator(num_blocks=7, block_size=block_size)
    pool, store, tables, count = allocator.pool, {}, [], 0
    for verb, number in moves:
        pool.settle()
        at = number % len(tables) if tables else None
        if verb == "start":
            tables.append((allocator.start(), []))
        elif at is None:
            continue
        elif verb == "fork":
            table, tokens = tables[at]
            tables.append((allocator.fork(table), list(tokens)))
        elif verb == "free":
            allocator.free(tables.pop(at)[0])
        else:
            table, tokens = tables[at]
            placed, copies = allocator.append(table, number)
            for move in copies:
                for offset in range(block_size):
                    store[move.destination, offset] = store.get((move.source, offset))
            for _ in range(placed):
                place = len(tokens)
                store[table.block_ids[place // block_size], place % block_size] = count
                tokens.append(count)
                count += 1
        for table, tokens in tables:
            held = [
                store[table.block_ids[place // block_size], place % block_size]
                for place in range(table.num_filled)
            ]
            assert held == tokens
            assert len(table) == blocks_in(len(tokens), block_size)
        held_blocks = {block for table, _ in tables for block in table.block_ids}
        idle = (*pool.free_blocks, *pool.settling_blocks)
        assert sorted(idle) == sorted(set(range(7)) - held_blocks)
        assert allocator.usage().num_used == len(held_blocks) + pool.num_settling
