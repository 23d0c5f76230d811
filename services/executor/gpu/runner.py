"""Carries plans out on a GPU: all of a plan is put into its streams at once, and waited for later.

    transfer ─────────┐ out, in ┌──────────────────────────────────────
    compute  forward ─┘ ........└─ copies ─ forward ─ draws ─ read back
               of the plan before

Swaps wait for what the plan before wrote. Copies and the forward pass wait for the swaps that they
need: those in, and those out of blocks that they overwrite. A swap out that nobody overwrites goes
on beside the forward pass, to be waited for by the next plan's and by the result. A result is told
when all of its plan is done, so a block that is released then has no copy under way (law 2).

What was drawn stays on the device: the next plan's PREVIOUS is looked up there, and can be put
into the streams before anybody has read it.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.triton_gpu.backend import TritonKernels
from kernels.triton_gpu.sampling import Draws, sample
from kernels.triton_gpu.step import Bounds, LaidOut, StepLayout, StepRows, Sums
from services.executor.batch import FlatRows, logit_tokens
from services.executor.gpu.decode_graphs import GRAPH_ROWS, DecodeGraphs, Progress
from services.executor.gpu.division import Division, divide
from services.executor.gpu.forward import forward
from services.executor.gpu.gpu_step import GpuStep, Marks
from services.executor.gpu.parcel import Parcel
from services.executor.gpu.streams import Event, Streams
from services.executor.kv_pool import KVPools
from services.executor.model.llama import Llama
from services.executor.runner import Launched
from services.executor.sampler import Drawing, Sampler
from shared.errors import InvariantBroken
from shared.messages import PREVIOUS, Move, Row, StepPlan

MOST_DRAWS: Final = 8192
"""Tokens drawn on the device in one step, and kept there; a step with more draws on the CPU."""


class GpuRunner:
    """Runs a Llama on a GPU: `Runner`, with up to two plans under way.

    Args:
        model: with its weights on `streams.device`, over the Triton kernels.
        pools: its pools, one there and one in pinned memory.
        streams: of the device.
        max_model_len: the longest sequence.
        drawing: of the CPU's sampler, for the rows that only it knows; NumPy if it is None.
        graph_rows: numbers of rows that have CUDA graphs, ascending.
    Raises: InvariantBroken if a block is not one piece of memory in both pools.
    """

    def __init__(
        self,
        model: Llama,
        pools: KVPools,
        streams: Streams,
        max_model_len: int,
        drawing: Drawing | None = None,
        graph_rows: Sequence[int] = GRAPH_ROWS,
    ) -> None:
        if not (pools.gpu.is_contiguous() and pools.cpu.is_contiguous()):
            raise InvariantBroken(
                "a block of a layer-major pool is not one piece of memory, and a GPU's runner "
                "moves each in one copy: make the pools block-major"
            )
        self._model = model
        self._pools = pools
        self._streams = streams
        self._sampler = Sampler(drawing)
        self._layout = layout_of(model)
        self._drawn = drawn_tokens(streams.device)
        self.graphs = DecodeGraphs(
            *(model, pools.gpu, self._layout, streams, self._drawn),
            *(max_model_len, pools.block_size, graph_rows),
        )
        streams.synchronize()  # what was put into its memory so far was by another stream
        self._swapping_out: Event | None = None
        """The end of a swap out beside which the last forward pass ran."""

    def capture(self, progress: Progress) -> None:
        """Capture the graphs; before, everything runs eagerly."""
        self.graphs.capture(progress)

    def launch(self, plan: StepPlan, flat: FlatRows, before: Launched | None) -> Launched:
        """Put all of a plan into the streams."""
        try:
            return self._launch(plan, flat, before)
        except BaseException:
            self._streams.synchronize()  # so that nothing of it touches blocks that are released
            raise

    def _launch(self, plan: StepPlan, flat: FlatRows, before: Launched | None) -> GpuStep:
        if before is not None and not isinstance(before, GpuStep):
            raise InvariantBroken(f"step {plan.step_id} goes on from one that no GPU ran")
        asking = [row for row in plan.rows if row.token_ids[-1] == PREVIOUS]
        token_ids, sources = _resolved(flat, asking, plan.rows, before)
        wanted = logit_tokens(plan.rows, flat)
        step = GpuStep(
            plan=plan,
            before=before if asking else None,
            division=divide(plan.rows, len(wanted), self._model.shape.vocab_size, MOST_DRAWS),
            sampler=self._sampler,
            marks=Marks(begun=self._streams.compute.record()),
        )
        self._move(step, flat)
        if plan.rows:
            self._compute(step, self._step_rows(flat, token_ids, wanted), sources)
        step.marks.drawn = self._streams.compute.record()
        return step

    # ------------------------------------------------------------- moves and copies

    def _move(self, step: GpuStep, flat: FlatRows) -> None:
        """Swaps, and copies within the pool."""
        compute, transfer = self._streams.compute, self._streams.transfer
        plan, marks = step.plan, step.marks
        if self._swapping_out is not None:
            compute.wait(self._swapping_out)
            self._swapping_out = None
        if plan.swap_out or plan.swap_in:
            transfer.wait(marks.begun)
            marks.moves_begun = transfer.record()
            transfer.run(lambda: self._swap(plan))
            marks.moved = transfer.record()
            if plan.swap_in or _overwrites(plan, flat):
                compute.wait(marks.moved)
            else:
                self._swapping_out = marks.moved
        marks.may_copy = compute.record()
        if plan.copies:
            pairs = self._streams.host((len(plan.copies), 2), torch.int64)
            pairs.copy_(torch.tensor([(one.source, one.destination) for one in plan.copies]))
            compute.run(lambda: self._copy(pairs))
        marks.copied = compute.record()

    def _copy(self, pairs: Tensor) -> None:
        there = pairs.to(self._streams.device, non_blocking=True)
        self._model.copy_blocks(self._pools.gpu, self._pools.gpu, there)

    def _swap(self, plan: StepPlan) -> None:
        """Each block by itself: it is one piece in both pools, and megabytes long."""
        _cross(self._pools.gpu, self._pools.cpu, plan.swap_out)
        _cross(self._pools.cpu, self._pools.gpu, plan.swap_in)

    # ------------------------------------------------------------- forward and draws

    def _step_rows(
        self, flat: FlatRows, token_ids: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> StepRows:
        return StepRows(
            token_ids=token_ids,
            positions=flat.positions,
            slots=flat.slots,
            row_starts=flat.row_starts,
            context_lengths=flat.context_lengths,
            blocks=flat.blocks,
            table_starts=flat.table_starts,
            logit_tokens=wanted,
        )

    def _compute(self, step: GpuStep, rows: StepRows, sources: NDArray[np.int64]) -> None:
        """Forward, draws, and what is read back, by a graph if there is one for it."""
        graphed = self.graphs.lay_out(rows)
        if graphed is not None:
            bounds, padded = graphed
            parcel = _parcel(padded, sources, step.division, bounds.rows)
            if self.graphs.holds(parcel):
                self._run(step, parcel, padded, bounds)
                return
        laid = self._layout.lay_out(rows)
        if laid is None:
            raise InvariantBroken("a step of its own size does not fit into it")
        self._run(step, _parcel(laid, sources, step.division, len(sources)), laid, None)

    def _run(self, step: GpuStep, parcel: Parcel, laid: LaidOut, bounds: Bounds | None) -> None:
        compute, marks = self._streams.compute, step.marks
        host = self._streams.host((parcel.num_bytes,), torch.uint8)
        parcel.write(host)
        made: list[tuple[Tensor, dict[str, Tensor]]] = []

        def pass_forward() -> None:
            if bounds is not None:
                there = parcel.read(self.graphs.replay(bounds, host))
                made.append((self.graphs.logits, there))
                return
            there = parcel.read(host.to(self._streams.device, non_blocking=True))
            sums = Sums.of(self._layout, laid.num_partials, self._streams.device)
            made.append((
                forward(self._model, self._pools.gpu, self._layout, there, self._drawn, sums),
                there,
            ))  # fmt: skip

        marks.passing = compute.record()
        compute.run(pass_forward)
        marks.computed = compute.record()
        compute.run(lambda: self._draw(step, *made.pop()))

    def _draw(self, step: GpuStep, logits: Tensor, there: dict[str, Tensor]) -> None:
        """Draw on the device; bring tokens, and logits that the CPU asks for, to main memory."""
        division, streams = step.division, self._streams
        if division.places:
            draws = Draws(
                there["rows"], there["temperatures"], there["top_ks"], there["top_ps"],
                there["min_ps"], there["seeds"], there["indexes"], there["draw_positions"],
            )  # fmt: skip
            tokens = sample(logits, draws, out=self._drawn[: len(division.places)])
            step.tokens_read = streams.host((len(tokens),), torch.int32)
            step.tokens_read.copy_(tokens, non_blocking=True)
        if division.host_rows:
            asked = logits.index_select(0, there["host_logits"])
            step.logits_read = streams.host(tuple(asked.shape), torch.float32)
            step.logits_read.copy_(asked, non_blocking=True)


def drawn_tokens(device: torch.device) -> Tensor:
    """[MOST_DRAWS] int32, there: room for what a step draws. -1: nothing was."""
    return torch.full((MOST_DRAWS,), -1, dtype=torch.int32, device=device)


def layout_of(model: Llama) -> StepLayout:
    """How the model's steps are laid out. Raises: InvariantBroken unless its kernels are Triton."""
    if not isinstance(model.kernels, TritonKernels):
        raise InvariantBroken(f"a GPU runs no model over the kernels {model.kernels.name}")
    return model.kernels.step_layout(model.shape, model.pool_dtype, model.windows)


def _parcel(
    laid: LaidOut, sources: NDArray[np.int64], division: Division, num_tokens: int
) -> Parcel:
    """A step as it crosses: first what is of a graph's size, then the tables, then the draws."""
    padded = np.full(num_tokens, -1, np.int64)
    padded[: len(sources)] = sources
    arrays: dict[str, NDArray[Any]] = {"sources": padded, **laid.arrays, **division.draws}
    return Parcel({**arrays, "host_logits": division.host_logits})


def _resolved(
    flat: FlatRows, asking: Sequence[Row], rows: Sequence[Row], before: GpuStep | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[num_tokens] token ids, and where on the device those are that are not known here.

    What the CPU drew in the plan before is waited for. A row that goes on from a token that could
    not be drawn computes with token 0: `GpuStep` says that it failed.
    """
    token_ids, sources = flat.token_ids.copy(), np.full(len(flat.token_ids), -1, np.int64)
    if not asking:
        return token_ids, sources
    if before is None:
        raise InvariantBroken("a row says PREVIOUS, and there is no plan before")
    last = {
        row.sequence_id: int(end) - 1 for row, end in zip(rows, flat.row_starts[1:], strict=True)
    }
    for row in asking:
        name, place = row.sequence_id, last[row.sequence_id]
        if name in before.division.places:
            token_ids[place], sources[place] = 0, before.division.places[name]
        else:
            token_ids[place] = before.tokens.get(name, 0)
    return token_ids, sources


def _overwrites(plan: StepPlan, flat: FlatRows) -> bool:
    """Whether a plan writes into blocks that it swaps out."""
    written = {move.destination for move in plan.copies}
    written.update(flat.written.tolist())
    return any(move.source in written for move in plan.swap_out)


def _cross(source: Tensor, destination: Tensor, moves: Sequence[Move]) -> None:
    for move in moves:
        destination[move.destination].copy_(source[move.source], non_blocking=True)
