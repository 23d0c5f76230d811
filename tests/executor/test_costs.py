"""Costs are what the clock says: a model whose moves and steps take known times shows it."""

import pytest
import torch

from services.executor.costs import ALL_S, measure_costs
from services.executor.model.toy import ToyModel


class Weighed(ToyModel):
    """A toy whose work takes its time on a clock of its own; it remembers what it was asked."""

    def __init__(self, step_s=0.0, token_s=0.0, block_s=0.0):
        super().__init__()
        self.now, self.step_s, self.token_s, self.block_s = 50.0, step_s, token_s, block_s
        self.pools, self.prompts, self.moved = [], [], []

    def clock(self):
        self.now += 1e-6  # nothing takes no time at all
        return self.now

    def allocate_pool(self, num_blocks, block_size):
        self.pools.append(super().allocate_pool(num_blocks, block_size))
        return self.pools[-1]

    def forward(self, pool, batch):
        assert any(pool is own for own in self.pools)
        self.prompts.append(len(batch.token_ids))
        self.now += self.step_s + self.token_s * len(batch.token_ids)
        return super().forward(pool, batch)

    def copy_blocks(self, source, destination, pairs):
        self.moved.append((source is destination, len(pairs)))
        self.now += self.block_s * len(pairs)
        super().copy_blocks(source, destination, pairs)


def measured(model, *, max_model_len=8192, block_size=16, can_swap=True):
    block_bytes = block_size * model.kv_bytes_per_token
    return measure_costs(
        model, block_size, block_bytes, max_model_len, can_swap=can_swap, clock=model.clock
    )


def test_the_copy_rate_is_bytes_over_time_between_two_pools():
    model = Weighed(block_s=0.0002)
    costs = measured(model)
    assert costs.block_bytes == 128
    assert costs.copy_bytes_per_s == pytest.approx(128 / 0.0002, rel=0.01)
    assert not any(is_same for is_same, _ in model.moved)
    assert {count for _, count in model.moved} == {1, 2, 4, 8, 16, 32, 64}


def test_slow_moves_are_not_followed_by_larger_ones():
    model = Weighed(block_s=0.02)
    assert measured(model).copy_bytes_per_s == pytest.approx(128 / 0.02, rel=0.01)
    assert [count for _, count in model.moved] == [1, 1, 1, 1, 2, 2]  # the first: to wake threads
    crawling = Weighed(block_s=9.0)
    assert measured(crawling).copy_bytes_per_s == pytest.approx(128 / 9.0)
    assert [count for _, count in crawling.moved] == [1, 1, 1, 1]


def test_without_swap_space_nothing_is_moved_and_the_rate_is_not_known():
    model = Weighed()
    assert measured(model, can_swap=False).copy_bytes_per_s == 0.0
    assert model.moved == []


def test_the_prefill_rate_is_that_of_the_longest_prompt_there_is_time_for():
    slow, fast = Weighed(token_s=0.001), Weighed(token_s=0.0001)
    assert measured(slow).prefill_tokens_per_s == pytest.approx(1000, rel=0.01)
    assert slow.prompts == [16, 32, 64, 128]
    assert measured(fast).prefill_tokens_per_s == pytest.approx(10_000, rel=0.01)
    assert fast.prompts == [16, 32, 64, 128, 256, 512]


def test_a_toy_whose_step_takes_long_is_measured_with_it():
    model = Weighed(step_s=0.15)
    assert measured(model).prefill_tokens_per_s == pytest.approx(16 / 0.15, rel=0.01)
    assert model.prompts == [16]  # one step: there is no time for more


@pytest.mark.parametrize("token_s", [0.0001, 0.0004, 0.0007, 0.001, 0.002, 0.003])
@pytest.mark.parametrize("block_s", [0.0, 0.0003, 0.01, 0.04])
def test_it_is_over_in_time_unless_the_first_of_each_take_longer(token_s, block_s):
    model = Weighed(token_s=token_s, block_s=block_s)
    measured(model)
    first_of_each = 4 * block_s + 16 * token_s
    assert model.now - 50.0 <= max(1.1 * ALL_S, 0.1 + first_of_each + 8 * block_s)


def test_no_prompt_is_longer_than_a_sequence_may_be():
    model = Weighed()
    measured(model, max_model_len=20)
    assert model.prompts == [16, 20]


@pytest.mark.parametrize("block_size", [1, 3, 1024])
def test_any_block_size_can_be_measured(block_size):
    costs = measured(Weighed(), block_size=block_size)
    assert costs.block_bytes == 8 * block_size
    assert min(costs.copy_bytes_per_s, costs.prefill_tokens_per_s) > 0


def test_blocks_larger_than_the_scratch_memory_are_measured_one_by_one():
    model = Weighed()
    costs = measure_costs(model, 16, 2**30, 64, can_swap=True)  # so large, says the caller
    assert {count for _, count in model.moved} == {1}
    assert costs.copy_bytes_per_s > 0


def test_the_measured_pools_are_its_own():
    model = Weighed()
    serving = model.allocate_pool(64, 16)
    before = serving.clone()
    measured(model)
    assert torch.equal(serving, before)
