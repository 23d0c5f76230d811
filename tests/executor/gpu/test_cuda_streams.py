"""What a GPU's streams ask of torch, of which a made-up one keeps the list."""

from contextlib import contextmanager

import pytest
import torch

from services.executor.gpu.streams import CudaStreams


class MadeUp:
    """`torch.cuda`, which writes down what is asked of it, and where jobs run."""

    def __init__(self):
        self.log, self.where, self.num_pools = [], "default", 0
        made_up = self
        names = iter(("compute", "transfer"))

        class Stream:
            def __init__(self, device):
                self.name = next(names)

            def wait_event(self, event):
                made_up.log.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.name, self.is_past = None, False

            def record(self, stream):
                made_up.log.append(f"recorded in {stream.name}")
                self.name, self.at_ms = f"{stream.name}'s", 1000 * len(made_up.log)

            def query(self):
                return self.is_past

            def synchronize(self):
                self.is_past = True

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        class CUDAGraph:
            def replay(self):
                made_up.log.append("replayed")

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph

    def job(self):
        self.log.append(f"job in {self.where}, inference: {torch.is_inference_mode_enabled()}")

    def graph_pool_handle(self):
        self.num_pools += 1
        return self.num_pools

    def synchronize(self, device):
        self.log.append("synchronized")

    @contextmanager
    def stream(self, stream):
        self.where = stream.name
        yield
        self.where = "default"

    @contextmanager
    def graph(self, graph, pool, stream):
        self.where = f"a graph of {stream.name} in memory {pool}"
        yield
        self.where = "default"


@pytest.fixture
def cuda(monkeypatch):
    made_up = MadeUp()
    monkeypatch.setattr(torch, "cuda", made_up)
    return made_up


def test_a_job_is_run_once_where_it_belongs_before_it_is_captured_there(cuda):
    """The first time it compiles, which nothing may in a capture; and it does so no more later."""
    streams = CudaStreams(torch.device("cuda"))
    memory, other = streams.graph_memory(), streams.graph_memory()
    replay = streams.capture(cuda.job, memory)
    assert cuda.log == [
        "job in compute, inference: True",
        "synchronized",
        "job in a graph of compute in memory 1, inference: True",
    ]
    streams.capture(cuda.job, other)
    assert "memory 2" in cuda.log[-1]
    streams.compute.run(replay)
    assert cuda.log[-1] == "replayed"


def test_jobs_events_and_waits_are_of_their_streams(cuda):
    streams = CudaStreams(torch.device("cuda"))
    first = streams.compute.record()
    streams.transfer.wait(first)
    streams.transfer.run(cuda.job)
    second = streams.transfer.record()
    streams.compute.wait(second)
    assert cuda.log == [
        "recorded in compute",
        "transfer waits for compute's",
        "job in transfer, inference: True",
        "recorded in transfer",
        "compute waits for transfer's",
    ]
    assert not second.is_done()
    second.wait()
    assert second.is_done()
    assert second.seconds_since(first) == 3.0
