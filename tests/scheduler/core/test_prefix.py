"""The prefix cache: what is found, by whom, when it is lost, and that it changes no answer."""

import pytest

from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.prefix import block_hash, root_hash
from services.scheduler.core.lifecycle import Status
from shared.errors import InvariantBroken
from shared.messages import Finished, PreemptionMode

PROMPT = tuple(range(1, 31))


@pytest.fixture
def cached(build):
    """A house with the cache on: as many blocks of four tokens as asked for."""

    def build_cached(num_blocks=32, block_size=4, **settings):
        return build(num_blocks, block_size, enable_prefix_caching=True, **settings)

    return build_cached


def cached_tokens(house, name):
    return house.stream(name).finished.usage.cached_tokens


def computed(house):
    return house.core.counters.computed_tokens


# ------------------------------------------------------------------ the pool


def test_a_kept_block_is_cached_when_nobody_holds_it_and_may_be_shared_again():
    pool = BlockPool(2)
    block = pool.take()
    pool.keep(block)
    pool.release(block)
    assert (pool.settling_blocks, pool.cached_blocks) == ((block,), ())
    pool.settle()
    assert (pool.cached_blocks, pool.free_blocks, pool.num_available) == ((block,), (1,), 2)
    pool.share(block)
    assert (pool.ref_count(block), pool.cached_blocks) == (1, ())


def test_a_free_block_goes_before_a_cached_one_and_of_these_the_oldest():
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.append
    for _ in range(2):
        pool.keep(pool.take())
    for block in (1, 0):
        pool.release(block)
        pool.settle()
    assert pool.cached_blocks == (1, 0)
    assert [pool.take(), pool.take(), pool.take()] == [2, 1, 0]
    assert evicted == [1, 0]


def test_a_block_that_a_plan_in_flight_names_settles_until_its_result():
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.release(block, last_step=7)
    pool.release(block, last_step=3)  # whoever gives it up last, step 7 still names it
    pool.settle(before_step=7)
    assert pool.settling_blocks == (block,)
    pool.settle(before_step=8)
    assert block in pool.free_blocks


def test_what_has_no_known_content_cannot_be_shared_again():
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(InvariantBroken, match="is free and cannot be shared"):
        pool.share(block)
    with pytest.raises(InvariantBroken, match="cannot be kept"):
        pool.keep(block)


def test_hashes_stand_for_all_that_comes_before_and_for_whose_it_is():
    root = root_hash(b"key", "salt")
    assert root != root_hash(b"keys", "alt")
    assert root != root_hash(b"key", "")
    first = block_hash(root, (1, 2, 3, 4))
    assert block_hash(first, (5,)) != block_hash(block_hash(root, (1, 2, 3, 5)), (5,))
    assert block_hash(root, (-1,)) != block_hash(root, (255,))


# ------------------------------------------------------------------ hits


def test_r15_four_equal_prompts_cost_one(build):
    """1,464 tokens, block size 16: 91 blocks are full; one token at least is left to compute."""
    house = build(512, 16, max_model_len=2_000, enable_prefix_caching=True)
    prompt = tuple(at % 39 + 1 for at in range(1_464))
    for name in "ABCD":
        house.submit(name, prompt, max_tokens=3, ignore_eos=True)
    house.run()
    assert [cached_tokens(house, name) for name in "ABCD"] == [0, 1456, 1456, 1456]
    assert {house.tokens(name) for name in "ABCD"} == {house.solo("A")}
    counters = house.core.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (4 * 1464, 3 * 1456)
    assert counters.prefix_cache_hit_rate == pytest.approx(3 * 1456 / (4 * 1464))
    assert computed(house) == 1464 + 3 * 8 + 4 * 2


def test_a_finished_request_leaves_its_blocks_for_the_next(cached):
    house = cached()
    house.submit("A", PROMPT, max_tokens=3, ignore_eos=True)
    house.run()
    assert house.core.usage().num_cached == 8
    before = computed(house)
    house.submit("B", PROMPT, max_tokens=3, ignore_eos=True)
    held = house.sequence("B").table.block_ids[:7]
    house.run()
    assert cached_tokens(house, "B") == 28
    assert computed(house) - before == 2 + 2
    assert len(set(held)) == 7
    assert house.tokens("B") == house.tokens("A") == house.solo("A")


def test_an_answer_is_found_again_too(cached):
    house = cached()
    house.submit("A", PROMPT, max_tokens=9, ignore_eos=True)
    house.run()
    house.submit("B", (*PROMPT, *house.tokens("A"), 5), max_tokens=2, ignore_eos=True)
    house.run()
    assert cached_tokens(house, "B") == 36  # 30 + 9, of which the last was never computed
    assert house.tokens("B") == house.solo("B")


def test_a_full_prompt_that_is_known_leaves_a_block_to_compute(cached):
    """32 tokens are eight full blocks; something has to be drawn from, so seven are taken."""
    house = cached()
    prompt = (*PROMPT, 3, 4)
    for name in "AB":
        house.submit(name, prompt, max_tokens=1, ignore_eos=True)
        house.run()
    assert cached_tokens(house, "B") == 28


def test_running_requests_share_blocks(cached):
    house = cached()
    house.submit("A", PROMPT, max_tokens=9, ignore_eos=True)
    house.step(2)
    house.submit("B", PROMPT, max_tokens=9, ignore_eos=True)
    house.step()
    shared = [block for block, _ in house.table("B") if house.ref_count(block) == 2]
    assert len(shared) == 7
    assert house.core.usage().num_shared == 7
    house.run()
    assert house.tokens("B") == house.solo("B")


def test_blocks_are_known_only_when_their_plan_has_returned(cached):
    house = cached(max_num_batched_tokens=512)
    house.submit("A", PROMPT, max_tokens=4, ignore_eos=True)
    assert house.core.steps.holdings.prefix.blocks == {}
    house.submit("B", PROMPT, max_tokens=4, ignore_eos=True)
    assert house.status("B") is Status.WAITING
    house.step()
    assert len(house.core.steps.holdings.prefix.blocks) == 7
    assert house.status("B") is Status.RUNNING


def test_who_asks_for_scores_of_its_prompt_takes_no_hits_but_leaves_some(cached):
    house = cached()
    for name in "AB":
        house.submit(name, PROMPT, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        house.run()
        assert cached_tokens(house, name) == 0
        assert house.stream(name).prompt_logprobs == house.scores(name)
    house.submit("C", PROMPT, max_tokens=2, ignore_eos=True)
    house.run()
    assert cached_tokens(house, "C") == 28
    assert house.core.counters.prefix_cache_queries == 30  # only C was looked up


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"key_hash": b"a"}, {"key_hash": b"b"}),
        ({"extra": {"cache_salt": "x"}}, {"extra": {"cache_salt": "y"}}),
        ({"extra": {"cache_salt": "x"}}, {}),
        ({"key_hash": b"ab"}, {"key_hash": b"a", "extra": {"cache_salt": "b"}}),
    ],
)
def test_tenants_cannot_probe_each_other(cached, first, second):
    house = cached()
    for name, whose in (("A", first), ("B", second), ("C", first)):
        house.submit(name, PROMPT, max_tokens=2, ignore_eos=True, **whose)
        house.run()
    assert [cached_tokens(house, name) for name in "ABC"] == [0, 0, 28]


def test_the_cache_can_be_off(build):
    house = build(32, 4, enable_prefix_caching=False)
    for name in "AB":
        house.submit(name, PROMPT, max_tokens=2, ignore_eos=True)
        house.run()
        assert cached_tokens(house, name) == 0
    assert house.core.usage().num_cached == 0
    assert house.core.counters.prefix_cache_queries == 0


def test_a_new_executor_knows_nothing(cached):
    house = cached()
    house.submit("A", PROMPT, max_tokens=2, ignore_eos=True)
    house.run()
    house.lose_executor()
    house.join(block_size=8)
    house.submit("B", PROMPT, max_tokens=2, ignore_eos=True)
    house.run()
    assert cached_tokens(house, "B") == 0
    assert house.tokens("B") == house.solo("B")


def test_what_waits_is_hashed_when_it_comes_and_not_again_for_another_executor(cached):
    house = cached(join=False)
    house.join()
    house.submit("A", PROMPT, max_tokens=2, ignore_eos=True)
    house.submit("B", PROMPT, max_tokens=2, ignore_eos=True)
    assert house.status("B") is Status.WAITING
    hashes = house.sequence("B").hashes
    assert len(hashes) == 7
    house.lose_executor()
    house.submit("C", PROMPT, max_tokens=2, ignore_eos=True)
    assert len(house.sequence("C").hashes) == 7
    house.join()
    assert house.sequence("B").hashes is hashes
    house.lose_executor()
    house.join(block_size=8)
    assert len(house.sequence("B").hashes) < 7
    house.run()
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


def test_blocks_of_another_size_are_known_by_other_hashes(cached):
    """Both prompts begin alike for four tokens, and not for eight."""
    house = cached()
    prompts = {"A": (1, 2, 3, 4, 5, 6, 7, 8, 9), "B": (1, 2, 3, 4, 9, 9, 9, 9, 9)}
    for name, prompt in prompts.items():
        house.submit(name, prompt, max_tokens=5, ignore_eos=True)
    house.step(2)
    assert house.ref_count(house.table("B")[0][0]) == 2
    house.lose_executor()
    house.join(block_size=8)
    house.run()
    for name in prompts:
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ eviction


def test_tails_are_evicted_before_heads(cached):
    """A leaves eight blocks; B takes three of them: those that A filled last."""
    house = cached(num_blocks=8)
    house.submit("A", PROMPT, max_tokens=3, ignore_eos=True)
    house.run()
    house.submit("B", tuple(range(31, 39)), max_tokens=3, ignore_eos=True)
    house.run()
    assert house.core.prefix_evictions == 3
    house.submit("C", PROMPT, max_tokens=1)
    house.run()
    assert cached_tokens(house, "C") == 20


def test_a_block_is_never_evicted_while_somebody_holds_it(cached):
    house = cached(num_blocks=10)
    house.submit("A", PROMPT, max_tokens=8, ignore_eos=True)
    house.step(2)
    for name in "BCD":
        house.submit(name, prompt=4, max_tokens=3, ignore_eos=True)
    house.run()
    for name in "ABCD":
        assert house.tokens(name) == house.solo(name)


# ------------------------------------------------------------------ what is coming


def test_a_waiting_request_waits_for_a_block_that_is_being_computed(cached):
    house = cached(max_num_batched_tokens=8)
    house.submit("A", PROMPT, max_tokens=2, ignore_eos=True)
    house.submit("B", PROMPT, max_tokens=2, ignore_eos=True)
    house.submit("C", prompt=2, max_tokens=2, ignore_eos=True)  # stands behind B
    while house.status("A") is not Status.FINISHED and len(house.tokens("A")) == 0:
        assert [house.status(name) for name in "BC"] == [Status.WAITING, Status.WAITING]
        house.step()
    assert house.status("B") is Status.RUNNING
    house.run()
    assert cached_tokens(house, "B") == 28
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)


@pytest.mark.parametrize("how", ["cancel", "stop_string"])
def test_who_was_to_compute_it_leaves_and_the_waiting_one_starts(cached, how):
    house = cached(max_num_batched_tokens=8)
    house.submit("A", PROMPT, max_tokens=2, ignore_eos=True)
    house.submit("B", PROMPT, max_tokens=2, ignore_eos=True)
    house.step()
    assert house.status("B") is Status.WAITING
    getattr(house, how)("A")
    house.step()
    assert house.status("B") is Status.RUNNING
    assert sum(house.core.steps.holdings.prefix.expected.values()) > 0  # B computes the rest
    house.run()
    assert cached_tokens(house, "B") == 8  # what A's first step computed
    assert house.tokens("B") == house.solo("B")


def test_two_that_computed_the_same_end_up_on_one_block(cached):
    """Both start before either knows of the other's answer; then they write the same."""
    house = cached(max_num_batched_tokens=64)
    house.submit("A", PROMPT[:6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    house.submit("B", PROMPT[:6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    house.step(4)
    tables = [house.sequence(name).table.block_ids for name in "AB"]
    assert tables[0][:2] == tables[1][:2]
    assert house.ref_count(tables[0][0]) == 2
    house.run()
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_a_block_given_up_for_an_equal_one_is_held_until_the_plans_that_name_it_return(cached):
    house = cached(plans_in_flight=2)
    house.submit("A", PROMPT[:6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    house.submit("B", PROMPT[:6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    pool, seen = house.core.steps.holdings.allocator.pool, 0
    while house.in_flight:
        named = {block for row in house.in_flight[0].rows for block in row.block_table}
        house.step()
        seen += bool(named.intersection(pool.settling_blocks))
    assert seen > 0
    for name in "AB":
        assert house.tokens(name) == house.solo(name)


def test_all_siblings_are_pointed_to_the_block_that_is_known(cached):
    """Two prompts of two blocks are computed at once; four answers need a block each.

    Six blocks just do once all four share the prompt's; with one sister left behind, two lack.
    """
    house = cached(num_blocks=6, watermark=0.0, join=False)
    for name in "AB":
        house.submit(name, PROMPT[:8], max_tokens=5, n=2, ignore_eos=True, prompt_logprobs=0)
    house.join()
    tables = [house.table(name, index) for name in "AB" for index in (0, 1)]
    assert len({block for table in tables for block, _ in table}) == 4
    house.step()
    tables = [house.table(name, index)[:2] for name in "AB" for index in (0, 1)]
    assert len(set(tables)) == 1
    assert [house.ref_count(block) for block, _ in tables[0]] == [4, 4]
    assert house.free == 0
    house.run()
    assert not house.core.counters.preemptions
    for name in "AB":
        assert house.answers(name) == house.solos(name)


# ------------------------------------------------------------------ with giving way


def test_who_gave_way_finds_its_own_blocks_again(cached):
    house = cached(num_blocks=7, block_size=16, preemption_mode="recompute")
    for name in "AB":
        house.submit(name, prompt=34, max_tokens=35, ignore_eos=True)
    house.run()
    assert house.core.counters.preemptions[PreemptionMode.RECOMPUTE] >= 1
    plain = 2 * (34 + 34)
    assert computed(house) < plain + 34  # less than the victim's prompt was computed again
    for name in "AB":
        assert house.tokens(name) == house.solo(name)
        assert cached_tokens(house, name) == 0  # of their first starts


def test_cached_tokens_are_told_to_whoever_attaches(cached):
    house = cached()
    for name in "AB":
        house.submit(name, PROMPT, max_tokens=2, ignore_eos=True, extra={"context": b"c"})
        house.run()
    house.attach("B", "h")
    assert house.stream("B", "h").attached.cached_tokens == 28
    assert house.replies(Finished)[0].usage.cached_tokens == 28


@pytest.mark.parametrize("how", ["gives way", "loses its executor"])
def test_cached_tokens_are_those_of_the_first_life(cached, how):
    house = cached(num_blocks=7, block_size=16, preemption_mode="recompute")
    for name in "AB":
        house.submit(name, prompt=34, max_tokens=35, ignore_eos=True)
    house.step(3)
    if how == "loses its executor":
        house.lose_executor()
        house.join()
    house.run()
    assert house.core.counters.preemptions[PreemptionMode.RECOMPUTE] >= 1
    assert [cached_tokens(house, name) for name in "AB"] == [0, 0]
    house.submit("AA", house.submits["A"].prompt, max_tokens=2, ignore_eos=True)
    house.lose_executor()
    assert house.core.book.get("AA").num_cached == 32
    house.join()
    house.run()
    assert cached_tokens(house, "AA") == 32  # though it computed all itself in the end


def test_of_a_resumed_answer_no_more_than_the_prompt_is_told_as_cached(cached):
    house = cached()
    house.submit("A", PROMPT[:9], max_tokens=20, ignore_eos=True)
    house.run()
    so_far = house.tokens("A")[:15]
    house.submit(
        "B", PROMPT[:9], max_tokens=20, ignore_eos=True, generated=so_far,
        extra={"context": b"c"},
    )  # fmt: skip
    assert house.core.book.get("B").num_cached == 20
    house.attach("B", "h")
    assert house.stream("B", "h").attached.cached_tokens == 9
    house.run()
    assert house.stream("B", "h").finished.usage.cached_tokens == 9
    assert house.tokens("B", "h") == house.solo("B")
