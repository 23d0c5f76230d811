"""Costs on a GPU: by plans, over the pools that will serve, in the streams that will move them."""

import pytest
import torch

from services.executor.devices import Place
from services.executor.gpu.rehearsal import Rehearsal
from services.executor.gpu.start import GpuStart
from shared.messages import PREVIOUS
from tests.executor.gpu.late_streams import LateStreams
from tests.executor.gpu.machines import BLOCK_SIZE, NUM_ASIDE, gpu, plain
from tests.executor.plans import plan, row
from tests.kernels.decoders import Sizes

SMALL = Sizes(hidden=16, inner=16, heads=1, kv_heads=1, head_dim=16, layers=1, vocab=61)
LONGEST = 40


class Timed(LateStreams):
    """A device with a clock: each of its jobs takes its stream's time, and nothing else does any.

    Attributes:
        compiling_s: what the first job of each stream takes beside.
    """

    def __init__(self, compiling_s=0.0):
        super().__init__(0)
        self.now = 0.0
        self.job_s = {"compute": 0.002, "transfer": 0.0005}
        self.compiling_s = dict.fromkeys(self.job_s, compiling_s)

    def advance(self):
        num_before = len(self.ran)
        super().advance()
        for name in self.ran[num_before:]:
            self.now += self.job_s[name] + self.compiling_s.pop(name, 0.0)

    def clock(self):
        self.now += 1e-9  # nothing takes no time at all
        return self.now


def rehearsal(streams, num_aside=NUM_ASIDE):
    machine = gpu((), streams, SMALL)
    machine.pools.num_cpu_blocks = num_aside
    return machine, Rehearsal(machine.runner, machine.pools, SMALL.vocab, LONGEST)


def test_moves_are_timed_as_the_runner_moves(monkeypatch):
    streams = Timed()
    machine, first = rehearsal(streams)
    monkeypatch.setattr(machine.model, "copy_blocks", None)  # another way to move
    costs = first.costs(block_bytes=1000, clock=streams.clock)
    median = 3  # of 1, 2, 4 and 8 blocks, each there and back
    assert costs.copy_bytes_per_s == pytest.approx(
        1000 * median / streams.job_s["transfer"], rel=0.001
    )
    jobs = 2  # a pass, and its draws
    assert costs.prefill_tokens_per_s == pytest.approx(
        LONGEST / (jobs * streams.job_s["compute"]), rel=0.001
    )


def test_once_it_is_warm_no_compiling_is_in_the_costs():
    told = []
    for compiling_s in (0.0, 60.0):
        streams = Timed(compiling_s)
        _, first = rehearsal(streams)
        first.warm_up()
        assert not streams.compiling_s
        told.append(first.costs(block_bytes=1000, clock=streams.clock))
    assert told[0].copy_bytes_per_s == pytest.approx(told[1].copy_bytes_per_s, rel=0.001)
    assert told[0].prefill_tokens_per_s == pytest.approx(told[1].prefill_tokens_per_s, rel=0.001)


def test_without_swap_space_nothing_is_moved():
    streams = Timed()
    _, first = rehearsal(streams, num_aside=0)
    first.warm_up()
    assert first.costs(block_bytes=1000, clock=streams.clock).copy_bytes_per_s == 0.0
    assert "transfer" not in streams.ran


@pytest.mark.parametrize("longest", [1, 2, 600])
def test_sequences_of_any_length_can_be_rehearsed(longest):
    machine = gpu((), None, SMALL)
    first = Rehearsal(machine.runner, machine.pools, SMALL.vocab, min(longest, 96))
    first.warm_up(longest)
    assert first.costs(block_bytes=1000).prefill_tokens_per_s > 0


def test_what_comes_after_is_as_if_nothing_had_been_rehearsed():
    plans = [
        plan(row((5, 6, 7), 0, (3,), 1), row((8,), 0, (4,), 2), step_id=1),
        plan(row((PREVIOUS,), 3, (3,), 1), row((PREVIOUS,), 1, (4,), 2), step_id=2),
    ]
    machine = gpu((2, 4), None, SMALL)
    Rehearsal(machine.runner, machine.pools, SMALL.vocab, LONGEST).warm_up()
    ours, theirs = machine.run(*plans), plain(SMALL).run(*plans)
    assert [made.sampled for made in ours] == [made.sampled for made in theirs]
    assert not torch.isnan(machine.pools.gpu[3, :, :, :, :3]).any()


def test_a_start_in_the_interpreter_ends_with_a_runner_that_has_done_it_all_once(monkeypatch):
    machine, phases, copied = gpu((), None, SMALL), [], []
    copy = machine.model.copy_blocks

    def noted(source, destination, pairs):
        copied.append(source is destination)
        copy(source, destination, pairs)

    monkeypatch.setattr(machine.model, "copy_blocks", noted)
    start = GpuStart(machine.model, Place.INTERPRETER, phases.append)
    assert start.bytes_for_pool(BLOCK_SIZE, LONGEST, 0.9) is None
    runner, costs = start.runner(machine.pools, LONGEST, 1000, None)
    assert runner.graphs.num_captured == len(runner.graphs.bounds) == 2
    assert runner.graphs.num_replayed == 1
    assert copied == [True]  # blocks that were swapped went another way
    assert costs.block_bytes == 1000
    assert min(costs.copy_bytes_per_s, costs.prefill_tokens_per_s) > 0
    assert phases == [
        "capturing graphs, 1 of 2", "capturing graphs, 2 of 2", "warming up", "measuring"
    ]  # fmt: skip
