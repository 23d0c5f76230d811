"""Blocks that a plan moves: in which order, and before what; and what a plan that fails leaves."""

from dataclasses import replace

import pytest
import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import InlineStreams
from shared.errors import InvariantBroken
from shared.messages import Move, StepFailed
from tests.executor.gpu.late_streams import LateStreams
from tests.executor.gpu.machines import gpu, pools_of
from tests.executor.plans import plan, row
from tests.kernels.decoders import Sizes, random_decoder

SMALL = Sizes(hidden=16, inner=16, heads=1, kv_heads=1, head_dim=16, layers=1, vocab=61)


def numbered(machine):
    """The machine, every block of both pools full of a number of its own; and copies of them."""
    for first, pool in ((0, machine.pools.gpu), (1000, machine.pools.cpu)):
        for block in range(len(pool)):
            pool[block] = first + block
    return machine, machine.pools.gpu.clone(), machine.pools.cpu.clone()


@pytest.mark.parametrize("seed", range(3))
def test_blocks_go_out_before_others_come_into_their_places(seed):
    machine, there, aside = numbered(gpu((), LateStreams(seed), SMALL))
    machine.run(plan(swap_out=(Move(8, 0),), swap_in=(Move(1, 8),)))
    assert torch.equal(machine.pools.cpu[0], there[8])
    assert torch.equal(machine.pools.gpu[8], aside[1])


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_waits_until_what_it_overwrites_is_swapped_out(seed):
    """No row of the plan writes there: only the copy's destination tells."""
    machine, there, _ = numbered(gpu((), LateStreams(seed), SMALL))
    machine.run(plan(row((5, 6), 0, (2,)), swap_out=(Move(9, 1),), copies=(Move(7, 9),)))
    assert torch.equal(machine.pools.cpu[1], there[9])
    assert torch.equal(machine.pools.gpu[9], there[7])


def test_a_pool_whose_blocks_are_in_pieces_is_refused():
    kernels = TritonKernels(torch.float32, Gpu(), Layout.LAYER_MAJOR)
    model = random_decoder(kernels, replace(SMALL, layers=2))
    with pytest.raises(InvariantBroken, match="make the pools block-major"):
        GpuRunner(model, pools_of(model), InlineStreams(), 64)


class NoRoom(LateStreams):
    """Its main memory has no room for a step's arrays: a launch fails behind its swaps."""

    def host(self, shape, dtype):
        if dtype == torch.uint8:
            raise MemoryError("no room")
        return super().host(shape, dtype)


def test_of_a_plan_that_could_not_be_launched_nothing_is_under_way():
    """Its blocks may be given to others as soon as the scheduler hears of it."""
    streams = NoRoom(1)
    machine, there, _ = numbered(gpu((), streams, SMALL))
    pending = machine.interpreter.launch(plan(row((5, 6), 0, (2,)), swap_out=(Move(8, 0),)))
    assert isinstance(pending.failed, StepFailed)
    assert pending.failed.message == "MemoryError: no room"
    assert not any(stream.queue for stream in streams.streams)
    assert torch.equal(machine.pools.cpu[0], there[8])
