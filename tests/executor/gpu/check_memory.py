"""What is measured before a pool is made: a large step, and a few graphs."""

import pytest
import torch

from services.executor.gpu import memory
from services.executor.gpu.decode_graphs import all_bounds
from services.executor.gpu.streams import InlineStreams
from tests.executor.gpu.machines import gpu

STEP, KERNELS, SHARED, A_GRAPH = 500, 70, 3000, 9
"""Bytes that a step computes with; that its kernels keep; of all graphs; and of each one more."""


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(memory, "PROFILED_TOKENS", 40)
    monkeypatch.setattr(memory, "PROFILED_LOGITS", 12)


@pytest.mark.parametrize("longest", [40, 16, 7])
def test_a_large_step_of_prompts_of_any_length(monkeypatch, longest):
    model, shapes = gpu().model, []
    forward = model.forward

    def watched(pool, batch):
        logits = forward(pool, batch)
        tiles = batch.works[0][0].items
        shapes.append((len(batch.token_ids), int(tiles[:, 5].max()), *logits.shape))
        assert torch.isfinite(logits).all()
        return logits

    monkeypatch.setattr(model, "forward", watched)
    memory.profile(model, 4, longest)
    assert shapes == [(40, longest, 12, model.shape.vocab_size)]


class CountingStreams(InlineStreams):
    """They know how many graphs there are."""

    def __init__(self):
        super().__init__()
        self.num_graphs = 0

    def capture(self, job, memory):
        self.num_graphs += 1
        return super().capture(job, memory)


class OneGpu:
    """Memory, of which some is taken by whatever ran so far."""

    total_bytes = 100_000

    def __init__(self, streams, taken=1000):
        self.streams, self.taken = streams, taken

    def free_bytes(self):
        num_graphs = self.streams.num_graphs
        graphs = SHARED + A_GRAPH * num_graphs if num_graphs else 0
        return self.total_bytes - self.taken - graphs

    def peak_bytes(self, work):
        work()
        self.taken += KERNELS
        return STEP


@pytest.mark.parametrize("rows", [(1, 2), tuple(range(1, 20)), (3,), ()])
def test_what_is_in_use_what_a_step_takes_and_what_all_graphs_take(rows):
    """Of many graphs nine are tried; of those that are not, each takes what a later one took."""
    streams = CountingStreams()
    measured = memory.measure(gpu().model, 4, 200, streams, OneGpu(streams), rows)
    num_graphs = len(all_bounds(rows, 200))
    assert streams.num_graphs == min(num_graphs, 1 + memory.TRIED_GRAPHS)
    assert (measured.total, measured.used, measured.step) == (100_000, 1000 + KERNELS, STEP)
    assert measured.graphs == (SHARED + A_GRAPH * num_graphs if num_graphs else 0)
    left = 90_000 - measured.used - measured.step - measured.graphs
    assert measured.for_pool(0.9) == left


def test_memory_that_others_give_back_meanwhile_is_no_gain():
    class Giving(OneGpu):
        def free_bytes(self):
            self.taken -= 100
            return self.total_bytes - self.taken

    streams = CountingStreams()
    assert memory.measure(gpu().model, 4, 200, streams, Giving(streams), (1, 2)).graphs == 0
