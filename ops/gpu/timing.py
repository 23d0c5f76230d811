"""How long calls take on the device, without what launching them takes."""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

_REPLAYS: Final = 10


def capture(calls: Callable[[], object]) -> "torch.cuda.CUDAGraph":
    """Everything that `calls` launches, as a CUDA graph; it has run once before, to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph


def device_s(device: torch.device, call: Callable[[int], object], count: int = 1) -> float:
    """Seconds of one call: the median over replays of a graph of `call(0)` ... `call(count - 1)`.

    Without a GPU one call by the clock, after one that compiled it.
    """

    def calls() -> None:
        for i in range(count):
            call(i)

    if device.type != "cuda":
        call(0)
        return clock_s(device, lambda: call(0))
    graph = capture(calls)
    times = [replay_s(graph) / count for _ in range(_REPLAYS + 1)]
    return statistics.median(times[1:])


def replay_s(graph: "torch.cuda.CUDAGraph") -> float:
    """Seconds of one replay, on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def clock_s(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of one call by the clock, from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def best_s(device: torch.device, call: Callable[[], object], count: int) -> float:
    """The least of `count` measurements by the clock, after a call that warmed up."""
    call()
    return min(clock_s(device, call) for _ in range(count))
