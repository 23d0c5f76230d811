"""Forward passes of one new token a row, captured once as CUDA graphs and replayed.

A graph fixes its memory and its sizes. So there is one for each of some numbers of rows, times some
numbers of splits a row: a step takes the smallest that holds it, and rows that are missing are
written nowhere. One that is larger than all (more rows, or more than MOST_ITEMS splits), or has a
row of several tokens, runs eagerly: with the same kernels, and the same bits from attention and
draws.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.triton_gpu.step import Bounds, LaidOut, StepLayout, StepRows, Sums
from kernels.triton_gpu.work import SPLIT_TOKENS
from services.executor.gpu.forward import forward
from services.executor.gpu.parcel import Parcel
from services.executor.gpu.streams import Job, Streams
from services.executor.model.llama import Llama
from shared.geometry import blocks_in

GRAPH_ROWS: Final = (1, 2, 4, *range(8, 257, 8))
"""As vLLM's: beyond 8, so many that nobody computes a quarter too much for long."""
SPLITS_TIMES: Final = 4
"""From one graph to the next of as many rows. A split that is not there costs a program that ends
at once."""
MOST_ITEMS: Final = 4096
"""Splits in one graph, 2**20 tokens: their unfinished sums are its largest memory."""

_DRAW_BYTES: Final = 64
"""What a draw, or a row for the CPU's sampler, adds to a step."""

Progress = Callable[[str], None]


class DecodeGraphs:
    """All graphs of a model, and the memory that they read and write.

    Args:
        model: on the device.
        pool: of its keys and values.
        layout: of its steps.
        streams: the device's.
        drawn: [n] int32, there: what the plan before drew.
        max_model_len: the longest sequence.
        block_size: tokens a block.
        sizes: numbers of rows, ascending; none: everything runs eagerly.
    """

    def __init__(
        self,
        model: Llama,
        pool: Tensor,
        layout: StepLayout,
        streams: Streams,
        drawn: Tensor,
        max_model_len: int,
        block_size: int,
        sizes: Sequence[int] = GRAPH_ROWS,
    ) -> None:
        self._model = model
        self._pool = pool
        self._layout = layout
        self._streams = streams
        self._drawn = drawn
        self.bounds = all_bounds(sizes, max_model_len)
        self._graphs: dict[Bounds, Job] = {}
        self._graph_memory = streams.graph_memory()
        self.num_replayed = 0
        if not self.bounds:
            return
        rows = max(bounds.rows for bounds in self.bounds)
        items = max(bounds.items for bounds in self.bounds)
        fixed = max(self._parcel(bounds).num_bytes for bounds in self.bounds)
        tables = 4 * rows * blocks_in(max_model_len, block_size)
        self._memory = torch.zeros(
            fixed + tables + _DRAW_BYTES * (rows + 16), dtype=torch.uint8, device=streams.device
        )
        self.logits = torch.zeros(rows, model.shape.vocab_size, device=streams.device)
        self._sums = Sums.of(layout, items, streams.device)

    @property
    def num_captured(self) -> int:
        """Graphs that are ready."""
        return len(self._graphs)

    def capture(self, progress: Progress = lambda phase: None, count: int | None = None) -> None:
        """Capture the next `count` graphs, or all that are left.

        The largest is the first, so that the others fit into its memory.
        """
        left = [bounds for bounds in reversed(self.bounds) if bounds not in self._graphs]
        for bounds in left[:count]:
            progress(f"capturing graphs, {self.num_captured + 1} of {len(self.bounds)}")
            self._graphs[bounds] = self._streams.capture(self._job(bounds), self._graph_memory)

    def _job(self, bounds: Bounds) -> Job:
        """What a graph does; before, its memory is made that of a step without rows."""
        parcel = self._parcel(bounds)
        host = self._streams.host((parcel.num_bytes,), torch.uint8)
        parcel.write(host)
        self._streams.compute.run(lambda: self._fill(host))
        there, logits = parcel.read(self._memory), self.logits[: bounds.rows]

        def job() -> None:
            logits.copy_(
                forward(self._model, self._pool, self._layout, there, self._drawn, self._sums)
            )

        return job

    def lay_out(self, rows: StepRows) -> tuple[Bounds, LaidOut] | None:
        """A step as the smallest graph reads it that holds it; None if there is none."""
        needed = int((-(-rows.context_lengths // SPLIT_TOKENS)).sum())
        for bounds in self.bounds:
            is_large = bounds.rows >= len(rows.context_lengths) and bounds.items >= needed
            if is_large and bounds in self._graphs:
                laid = self._layout.lay_out(rows, bounds)
                if laid is not None:
                    return bounds, laid
        return None

    def holds(self, parcel: Parcel) -> bool:
        """Whether there is room for a step."""
        return parcel.num_bytes <= len(self._memory)

    def replay(self, bounds: Bounds, host: Tensor) -> Tensor:
        """Copy a step there and compute it. Call it as a job of the compute stream.

        Returns: where the step lies on the device.
        """
        self._fill(host)
        self._graphs[bounds]()
        self.num_replayed += 1
        return self._memory

    def _fill(self, host: Tensor) -> None:
        self._memory[: len(host)].copy_(host, non_blocking=True)

    def _parcel(self, bounds: Bounds) -> Parcel:
        """A step without rows."""
        none = np.zeros(0, np.int64)
        empty = StepRows(none, none, none, np.zeros(1, np.int64), none, none, none, none)
        laid = self._layout.lay_out(empty, bounds)
        arrays = {} if laid is None else laid.arrays
        arrays["blocks"] = np.zeros(1, np.int32)  # an empty array has no address to capture
        return Parcel({"sources": np.full(bounds.rows, -1, np.int64)} | arrays)


def all_bounds(sizes: Sequence[int], max_model_len: int) -> list[Bounds]:
    """Of every graph, the smallest first: of 1, 4, 16 ... splits a row, up to the longest row's.

    >>> [(one.rows, one.items) for one in all_bounds((1, 256), 2048)]
    [(1, 1), (1, 4), (1, 8), (256, 256), (256, 1024), (256, 2048)]
    """
    most = -(-max_model_len // SPLIT_TOKENS)
    splits = [1]
    while splits[-1] < most:
        splits.append(min(SPLITS_TIMES * splits[-1], most))
    found = [Bounds(rows, rows * each) for rows in sizes for each in splits]
    return sorted(
        (bounds for bounds in found if bounds.items <= MOST_ITEMS),
        key=lambda bounds: (bounds.rows, bounds.items),
    )
