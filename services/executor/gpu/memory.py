"""How much of a GPU's memory the KV pool gets.

Of all its memory the share --gpu-memory-utilization, less what is in use once the weights are
loaded, whoever uses it; less what a step computes with, measured in one of PROFILED_TOKENS tokens;
less what the graphs take, estimated from some that are captured and let go. The scheduler's
--max-num-batched-tokens is not known here: a step larger than that takes its memory from what the
share leaves free.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

import torch

from kernels.interface import PackedBatch
from kernels.triton_gpu.step import StepRows
from services.executor.gpu.decode_graphs import GRAPH_ROWS, DecodeGraphs
from services.executor.gpu.runner import drawn_tokens, layout_of
from services.executor.gpu.streams import Streams
from services.executor.model.llama import Llama
from shared.errors import StartError
from shared.geometry import blocks_in

PROFILED_TOKENS: Final = 2048
"""Of the step that is measured: four times the scheduler's default."""
PROFILED_LOGITS: Final = 512
"""As many rows as the scheduler's default, 256, and MAX_SCORED_TOKENS."""
TRIED_GRAPHS: Final = 8
"""Captured behind the first to see what each one more takes; memory is given out in megabytes."""


class DeviceMemory(Protocol):
    """What a device says of its memory."""

    total_bytes: int

    def free_bytes(self) -> int:
        """What is free once everything is done, and all that nobody holds is given back."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """The most that `work` holds at once, beside what is held before."""


class CudaMemory:
    """A GPU's, all of it; what torch holds of it, when `work` is measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        """By the driver: what other processes, kernels and graphs took is not free."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """By torch's allocator."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's memory.

    Attributes:
        total: all there is.
        used: by weights, by kernels, and by other processes.
        step: what the largest step computes with.
        graphs: what the graphs of decode steps take, with all that they read and write.
    """

    total: int
    used: int
    step: int
    graphs: int

    def for_pool(self, utilization: float) -> int:
        """What is left for the KV pool, of a share of the total.

        Raises: StartError if nothing is.
        """
        left = int(self.total * utilization) - self.used - self.step - self.graphs
        if left <= 0:
            raise StartError(
                f"--gpu-memory-utilization {utilization:g}: of {_gib(self.total)} on the GPU, "
                f"{_gib(self.used)} are in use with the weights, a step computes with "
                f"{_gib(self.step)} and graphs take {_gib(self.graphs)}: nothing is left for the "
                "KV pool; raise it, end what else uses the GPU, or choose a smaller model or dtype"
            )
        return left


def measure(
    model: Llama,
    block_size: int,
    longest: int,
    streams: Streams,
    memory: DeviceMemory,
    graph_rows: Sequence[int] = GRAPH_ROWS,
) -> GpuMemory:
    """Compute a large step and capture a few graphs, and see what they take.

    Args:
        model: its weights loaded, and no pool made.
        block_size: tokens a block.
        longest: of a sequence, in tokens.
        streams, memory: of the device.
        graph_rows: numbers of rows that will have graphs.
    """
    streams.synchronize()  # the weights came by another stream
    step = memory.peak_bytes(
        lambda: streams.compute.run(lambda: profile(model, block_size, longest))
    )
    used = memory.total_bytes - memory.free_bytes()
    graphs = _graph_bytes(model, block_size, longest, streams, memory, graph_rows)
    memory.free_bytes()  # so that what was tried is given back before a pool is made
    return GpuMemory(memory.total_bytes, used, step, graphs)


def profile(model: Llama, block_size: int, longest: int) -> None:
    """A step of PROFILED_TOKENS tokens of prompts. They share one block, whatever is in it."""
    pool = model.allocate_pool(1, block_size)
    pool.zero_()
    full, rest = divmod(PROFILED_TOKENS, min(longest, PROFILED_TOKENS))
    lengths = [min(longest, PROFILED_TOKENS)] * full + [rest] * bool(rest)
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = PackedBatch(
        token_ids=torch.zeros(PROFILED_TOKENS, dtype=torch.int64),
        positions=positions.int(),
        slots=positions % block_size,
        row_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        context_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(
            len(lengths), blocks_in(max(lengths), block_size), dtype=torch.int32
        ),
        logit_tokens=torch.arange(PROFILED_LOGITS),
    )
    model.forward(pool, layout_of(model).on(pool.device, StepRows.of(batch)))


def _graph_bytes(
    model: Llama,
    block_size: int,
    longest: int,
    streams: Streams,
    memory: DeviceMemory,
    graph_rows: Sequence[int],
) -> int:
    """The first graph, the largest, takes what all share; each one more adds its own launches."""
    before = memory.free_bytes()
    graphs = DecodeGraphs(
        *(model, model.allocate_pool(1, block_size), layout_of(model), streams),
        *(drawn_tokens(streams.device), longest, block_size, graph_rows),
    )
    streams.synchronize()  # its memory was made by another stream
    graphs.capture(count=1)
    first = memory.free_bytes()
    graphs.capture(count=TRIED_GRAPHS)
    num_tried = graphs.num_captured - 1
    each = max(0, first - memory.free_bytes()) / num_tried if num_tried > 0 else 0.0
    return max(0, before - first) + int(each * (len(graphs.bounds) - 1))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
