"""Moves on pools of a real model's layout: what is named moves, bit by bit, and nothing else."""

import random

import pytest
import torch

from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.messages import Move
from tests.executor.model.tiny import load, make

NUM_GPU, NUM_CPU = 12, 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make("llama", folder)
    models = {dtype: load(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return models | {torch.int8: load(folder, torch.bfloat16, kv_cache_dtype="int8")}


def bits(pool):
    """[num_blocks, bytes]: NaN has many forms, and each must arrive as it left."""
    return pool.reshape(len(pool), -1).view(torch.uint8).clone()


def poisoned(model, block_size):
    """Pools of which every byte is random, NaNs among them, no two blocks alike."""
    pools = KVPools(model, NUM_GPU, block_size, NUM_CPU)
    random_bytes = torch.Generator().manual_seed(block_size)
    for pool in (pools.gpu, pools.cpu):
        flat = pool.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(256, flat.shape, generator=random_bytes, dtype=torch.uint8))
        if pool.is_floating_point():
            pool[:, 0, 0, 0, ::3] = float("nan")
    return pools


MOVES = {
    "swap_out": ("gpu", "cpu", [(3, 0), (1, 6), (11, 2)]),
    "swap_in": ("cpu", "gpu", [(6, 0), (0, 11), (3, 5)]),
    "copy": ("gpu", "gpu", [(4, 1), (4, 2), (0, 11), (7, 8)]),  # one block, two forks
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 33, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, None])
def test_blocks_named_arrive_and_the_others_stay(tiny, dtype, block_size, name):
    pools = poisoned(tiny[dtype] if dtype else ToyModel(), block_size)
    source, destination, pairs = MOVES[name]
    expected = {pool: bits(getattr(pools, pool)) for pool in ("gpu", "cpu")}
    for from_block, to_block in pairs:
        expected[destination][to_block] = expected[source][from_block]
    getattr(pools, name)([Move(*pair) for pair in pairs])
    for pool in ("gpu", "cpu"):
        assert torch.equal(bits(getattr(pools, pool)), expected[pool])


def test_all_moves_of_a_kind_are_one_call_of_the_back_end(monkeypatch):
    calls = []
    monkeypatch.setattr(ToyModel, "copy_blocks", lambda _, *given: calls.append(given[2].tolist()))
    pools = KVPools(ToyModel(), NUM_GPU, 4, NUM_CPU)
    pools.copy([Move(1, 2), Move(1, 3), Move(5, 4)])
    pools.swap_out([])
    assert calls == [[[1, 2], [1, 3], [5, 4]]]


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_against_blocks_in_a_list(tiny, seed):
    """A swap and copy walk over poisoned pools; the model is two lists of byte strings."""
    dice = random.Random(seed)
    model = [*tiny.values(), ToyModel()][seed % 4]
    pools = poisoned(model, dice.choice([1, 3, 16, 64]))
    plain = {pool: [block.numpy().tobytes() for block in bits(getattr(pools, pool))]
             for pool in ("gpu", "cpu")}  # fmt: skip
    moved = 0
    for _ in range(200):
        name = dice.choice([*MOVES])
        source, destination, _ = MOVES[name]
        count = dice.randint(1, 6)
        targets = dice.sample(range(len(plain[destination])), count)
        origins = [b for b in range(len(plain[source])) if name != "copy" or b not in targets]
        moves = [Move(dice.choice(origins), target) for target in targets]
        getattr(pools, name)(moves)
        before = list(plain[source])
        for move in moves:
            plain[destination][move.destination] = before[move.source]
        moved += count
    for pool in ("gpu", "cpu"):
        held = [block.numpy().tobytes() for block in bits(getattr(pools, pool))]
        assert held == plain[pool]
    assert moved > 400


def test_a_pool_is_not_touched_before_it_is_used(tiny):
    """2 GiB of swap space cost nothing until blocks are in it."""
    block_bytes = 16 * tiny[torch.bfloat16].kv_bytes_per_token
    assert tiny[torch.bfloat16].times_auto == 1
    assert tiny[torch.int8].times_auto * tiny[torch.int8].kv_bytes_per_token * 16 == block_bytes
    before = resident_bytes()
    pools = KVPools(tiny[torch.bfloat16], 8, 16, 2 * 2**30 // block_bytes)
    assert pools.cpu.nbytes > 1.9 * 2**30
    assert resident_bytes() - before < 64 * 2**20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
