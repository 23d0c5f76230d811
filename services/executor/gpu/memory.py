"""How much of a GPU's memory the KV pool gets.

Of all its memory the share --gpu-memory-utilization, less what is in use once the weights are
loaded, whoever uses it; less what a step computes with, measured in one of PROFILED_TOKENS tokens;
less the graphs' own memory. The scheduler's --max-num-batched-tokens is not known here: a step
larger than that takes its memory from what the share leaves free.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from kernels.interface import PackedBatch
from kernels.triton_gpu.step import StepLayout
from services.executor.batch import moved
from services.executor.gpu.decode_graphs import GRAPH_ROWS, all_bounds
from services.executor.gpu.runner import layout_of
from services.executor.model.llama import Llama
from shared.errors import StartError
from shared.geometry import blocks_in

PROFILED_TOKENS: Final = 2048
"""Of the step that is measured: four times the scheduler's default."""
PROFILED_LOGITS: Final = 512
"""As many rows as the scheduler's default, 256, and MAX_SCORED_TOKENS."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's memory.

    Attributes:
        total: all there is.
        used: by weights, by kernels, and by other processes.
        step: what the largest step computes with.
        graphs: of the graphs of decode steps.
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


def measure(model: Llama, block_size: int, longest: int) -> GpuMemory:
    """Compute a large step and see what it takes. `longest` is that of a sequence."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile(model, block_size, longest)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(
        total=total,
        used=total - free,
        step=step,
        graphs=step + graph_bytes(layout_of(model), model.shape.vocab_size, longest),
    )


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
    model.forward(pool, moved(batch, pool.device))


def graph_bytes(layout: StepLayout, vocab_size: int, longest: int) -> int:
    """What graphs keep beside what a step computes with: unfinished sums, and logits."""
    bounds = all_bounds(GRAPH_ROWS, longest)
    items, rows = max(one.items for one in bounds), max(one.rows for one in bounds)
    float32 = 4
    return float32 * (items * layout.heads * (layout.head_dim + 1) + rows * vocab_size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
