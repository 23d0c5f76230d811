"""Queues of a GPU: what is put into one runs in order, and beside the others' unless it waits.

`CudaStreams` are a GPU's. `InlineStreams` do everything at once: for kernels in Triton's
interpreter, where there is no GPU to wait for. Whoever uses them cannot tell.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

Job = Callable[[], None]


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether the stream came to it."""

    def wait(self) -> None:
        """Block this thread until the stream comes to it."""

    def seconds_since(self, earlier: "Event") -> float:
        """Between two points, both done."""


class Stream(Protocol):
    """A queue of jobs."""

    def run(self, job: Job) -> None:
        """Have `job` put what it does on the device into this stream; the job itself runs now."""

    def record(self) -> Event:
        """The point after all that is in it so far."""

    def wait(self, event: Event) -> None:
        """Let what comes after this wait for another stream's event. Blocks nobody here."""


class Streams(Protocol):
    """A device's streams, and what memory and graphs it has.

    Attributes:
        compute: for copies of blocks, forward passes and draws.
        transfer: for blocks that cross between the pools.
    """

    device: torch.device
    compute: Stream
    transfer: Stream

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Main memory that the device copies from and to by itself.

        It is given out again only when the copies are done that were under way when it was let go.
        """

    def graph_memory(self) -> object:
        """Memory for what graphs compute with, shared by those that are captured with it.

        Only one of them may run at a time; it is given back when the last of them is let go.
        """

    def capture(self, job: Job, memory: object) -> Job:
        """A job that does again what `job` does on the device now, on the same memory.

        `job` must not wait for the device, nor depend on anything but that memory. It runs first,
        so that everything is compiled. `memory` is one that `graph_memory` made.
        """

    def synchronize(self) -> None:
        """Block this thread until nothing is under way."""


# --------------------------------------------------------------------------- a GPU's


class CudaEvent:
    """A `torch.cuda.Event`, with the time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        """By asking the driver."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """The interpreter lock is free meanwhile."""
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """By the device's clock."""
        return float(cast(CudaEvent, earlier).event.elapsed_time(self.event)) / 1000


class CudaStream:
    """A `torch.cuda.Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, job: Job) -> None:
        """As the current stream."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            job()

    def record(self) -> Event:
        """With the time."""
        return CudaEvent(self.stream)

    def wait(self, event: Event) -> None:
        """On the device."""
        self.stream.wait_event(cast(CudaEvent, event).event)


class CudaStreams:
    """Of one NVIDIA or AMD GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = CudaStream(device)
        self.compute: Stream = self._compute
        self.transfer: Stream = CudaStream(device)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned. torch's allocator of pinned memory knows which copies are under way."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def graph_memory(self) -> object:
        """A name that torch's allocator knows the memory by. One that was given back is no more."""
        return torch.cuda.graph_pool_handle()

    def capture(self, job: Job, memory: object) -> Job:
        """A CUDA graph."""
        self.compute.run(job)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=cast(Any, memory), stream=self._compute.stream),
        ):
            job()
        return graph.replay

    def synchronize(self) -> None:
        """All of the device."""
        torch.cuda.synchronize(self.device)


# --------------------------------------------------------------------------- at once


class InlineEvent:
    """Done since it was made."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """For nothing."""

    def seconds_since(self, earlier: Event) -> float:
        """By the host's clock."""
        return self.at - cast(InlineEvent, earlier).at


class InlineStream:
    """Whose jobs are done when they were put into it."""

    def run(self, job: Job) -> None:
        """Now."""
        with torch.inference_mode():
            job()

    def record(self) -> Event:
        """Now."""
        return InlineEvent()

    def wait(self, event: Event) -> None:
        """It was before."""


class InlineStreams:
    """For kernels that run in this thread, on tensors in main memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute: Stream = InlineStream()
        self.transfer: Stream = InlineStream()

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Any."""
        return torch.empty(shape, dtype=dtype)

    def graph_memory(self) -> object:
        """None: nothing is captured."""
        return None

    def capture(self, job: Job, memory: object) -> Job:
        """The job itself, once it ran."""
        self.compute.run(job)
        return job

    def synchronize(self) -> None:
        """Nothing is."""
