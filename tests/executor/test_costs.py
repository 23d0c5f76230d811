"""Costs are what the clock says: a model whose moves and steps take known times shows it."""

import time

import pytest
import torch

from services.executor.costs import measure_costs
from services.executor.model.toy import ToyModel


class Weighed(ToyModel):
    """A toy that takes its time, and remembers what it was asked."""

    def __init__(self, step_s=0.0, token_s=0.0, block_s=0.0):
        super().__init__(step_s)
        self.token_s, self.block_s = token_s, block_s
        self.pools, self.prompts, self.moved = [], [], []

    def allocate_pool(self, num_blocks, block_size):
        self.pools.append(super().allocate_pool(num_blocks, block_size))
        return self.pools[-1]

    def forward(self, pool, batch):
        assert any(pool is own for own in self.pools)
        self.prompts.append(len(batch.token_ids))
        time.sleep(self.token_s * len(batch.token_ids))
        return super().forward(pool, batch)

    def copy_blocks(self, source, destination, pairs):
        self.moved.append((source is destination, len(pairs)))
        time.sleep(self.block_s * len(pairs))
        super().copy_blocks(source, destination, pairs)


def measured(model, *, max_model_len=8192, block_size=16, can_swap=True):
    block_bytes = block_size * model.kv_bytes_per_token
    return measure_costs(model, block_size, block_bytes, max_model_len, can_swap=can_swap)


def test_the_copy_rate_is_bytes_over_time_between_two_pools():
    model = Weighed(block_s=0.0005)
    costs = measured(model)
    assert costs.block_bytes == 128
    assert 0.2 < costs.copy_bytes_per_s / (128 / 0.0005) <= 1.0
    assert not any(is_same for is_same, _ in model.moved)
    counts = [count for _, count in model.moved]
    assert {1, 2, 4, 8, 16, 32, 64} <= set(counts)


def test_without_swap_space_nothing_is_moved_and_the_rate_is_not_known():
    model = Weighed()
    assert measured(model, can_swap=False).copy_bytes_per_s == 0.0
    assert model.moved == []


def test_the_prefill_rate_is_that_of_the_longest_prompt_there_is_time_for():
    slow, fast = Weighed(token_s=0.001), Weighed()
    assert 0.5 < measured(slow).prefill_tokens_per_s / 1000 <= 1.0
    assert slow.prompts in ([32, 64, 128], [32, 64])  # 32 + 64 ms, and time for one more
    assert measured(fast).prefill_tokens_per_s > 0
    assert fast.prompts[-1] > 128


def test_a_toy_whose_step_takes_long_is_measured_with_it():
    model = Weighed(step_s=0.15)
    rate = measured(model).prefill_tokens_per_s
    assert model.prompts == [32]  # one step: there is no time for more
    assert 0.5 < rate / (32 / 0.15) <= 1.0


def test_no_prompt_is_longer_than_a_sequence_may_be():
    model = Weighed()
    measured(model, max_model_len=20)
    assert model.prompts == [20]


@pytest.mark.parametrize("block_size", [1, 3, 1024])
def test_any_block_size_can_be_measured(block_size):
    costs = measured(ToyModel(), block_size=block_size)
    assert costs.block_bytes == 8 * block_size
    assert min(costs.copy_bytes_per_s, costs.prefill_tokens_per_s) > 0


def test_blocks_larger_than_the_scratch_memory_are_measured_one_by_one():
    model = Weighed()
    costs = measure_costs(model, 16, 2**30, 64, can_swap=True)  # so large, says the caller
    assert {count for _, count in model.moved} == {1}
    assert costs.copy_bytes_per_s > 0


def test_the_measured_pools_are_its_own():
    model = ToyModel()
    serving = model.allocate_pool(64, 16)
    before = serving.clone()
    measured(model)
    assert torch.equal(serving, before)
