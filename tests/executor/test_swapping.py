"""Swapped out, overwritten, swapped in: bit by bit the logits of a cache that never moved."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.messages import Move, StepResult
from tests.executor.model.tiny import load, make
from tests.executor.plans import plan, row

PROMPT = tuple(3 + 7 * i % 90 for i in range(37))
NUM_BLOCKS = 48


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make("llama", folder)
    models = {dtype: load(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return models | {torch.int8: load(folder, torch.bfloat16, kv_cache_dtype="int8")}


class Watched:
    """An interpreter whose logits can be looked at. Every place not written yet is poison."""

    def __init__(self, model, block_size):
        self.model, self.logits = model, []
        self.pools = KVPools(model, NUM_BLOCKS, block_size, NUM_BLOCKS)
        self.interpreter = Interpreter(self, self.pools, max_model_len=64)
        self.shape = model.shape
        self.steps = 0
        self.poison(self.pools.gpu)
        self.poison(self.pools.cpu)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, pool, batch):
        self.logits.append(self.model.forward(pool, batch).clone())
        return self.logits[-1]

    def poison(self, blocks):
        """What nobody may read: NaN where numbers are, unwritten where tokens are."""
        blocks.fill_(float("nan") if blocks.is_floating_point() else -1)

    def run(self, *rows, **moves):
        """The logits of a plan that must succeed."""
        self.steps += 1
        result = self.interpreter.run(plan(*rows, step_id=self.steps, **moves))
        assert isinstance(result, StepResult), result
        assert not result.row_errors
        return self.logits[-1], result


def part(first, end, table, block_size, sequence_id=1):
    """A row of PROMPT[first:end]."""
    return row(PROMPT[first:end], first, table[: -(-end // block_size)], sequence_id)


def never_moved(model, block_size, cuts):
    """The logits at the end of each part."""
    still = Watched(model, block_size)
    table = list(range(NUM_BLOCKS))
    return [still.run(part(a, b, table, block_size))[0] for a, b in pairwise(cuts)]


CUTS = (0, 20, 29, 36, 37)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, None])
def test_a_cache_that_left_and_came_back_gives_the_same_bits(tiny, dtype, block_size):
    model = tiny[dtype] if dtype else ToyModel()
    expected = never_moved(model, block_size, CUTS)
    watched = Watched(model, block_size)
    table, moved, dice = list(range(NUM_BLOCKS)), 0, np.random.default_rng(block_size)
    moves = {}
    for (first, end), wanted in zip(pairwise(CUTS), expected, strict=True):
        logits, _ = watched.run(part(first, end, table, block_size), **moves)
        assert torch.equal(logits, wanted)  # bit by bit
        assert bool(moves) == (moved > 0)
        held = -(-end // block_size)
        places = dice.permutation(NUM_BLOCKS).tolist()
        cpu, back = places[:held], dice.permutation(NUM_BLOCKS).tolist()
        watched.run(swap_out=tuple(map(Move, table[:held], cpu)))
        watched.poison(watched.pools.gpu)  # all of it is overwritten meanwhile
        moves = {"swap_in": tuple(map(Move, cpu, back[:held]))}
        table, moved = back, moved + held
    assert moved >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, None])
def test_forks_that_copied_their_last_block_each_go_on_alone(tiny, dtype):
    """Copy-on-write of a prompt's partly filled block by three forks, in one plan."""
    model = tiny[dtype] if dtype else ToyModel()
    watched = Watched(model, 4)
    prompt, table = PROMPT[:6], [5, 9]
    watched.run(row(prompt, 0, table))
    copies = (Move(9, 20), Move(9, 2))
    tables = [[5, 20], [5, 2], [5, 9]]  # the last one writes in place
    forks = [row((90 + i,), 6, tables[i], i + 1) for i in range(3)]
    before = watched.pools.gpu.clone()
    logits, result = watched.run(*forks, copies=copies)
    assert result.timings.copy_s > 0
    assert len({tuple(fork.tolist()) for fork in logits}) == 3
    for i in range(3):
        alone = Watched(model, 4)
        alone.run(row(prompt, 0, [0, 1]))
        wanted, _ = alone.run(row((90 + i,), 6, [0, 1]))
        assert torch.equal(logits[i : i + 1], wanted)
    rest = [block for block in range(NUM_BLOCKS) if block not in (20, 2, 9)]
    assert same_bits(watched.pools.gpu[rest], before[rest])
    assert not same_bits(watched.pools.gpu[[20, 2, 9]], before[[20, 2, 9]])


def same_bits(one, other):
    """Also where they are NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_the_times_of_moves_are_told_apart(tiny):
    watched = Watched(tiny[torch.float32], 16)
    moves = tuple(Move(i, i) for i in range(40))
    still = [watched.run(row(PROMPT, 0, range(3)))[1].timings for _ in range(9)]
    _, swaps = watched.run(swap_out=moves)
    _, copies = watched.run(copies=tuple(Move(i, i + 24) for i in range(24)))
    nothing = 1e-4  # two looks at the clock and an empty loop
    assert max(min(t.swap_s for t in still), min(t.copy_s for t in still)) < nothing
    assert min(swaps.timings.swap_s, copies.timings.copy_s) > 0
    assert min(t.forward_s for t in still) > nothing
