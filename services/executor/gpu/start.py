"""What an executor on a GPU does before its first plan: measure, capture, rehearse."""

import time
from typing import Final

import torch

from services.executor.costs import LONGEST_PROMPT
from services.executor.devices import Place
from services.executor.gpu.decode_graphs import GRAPH_ROWS, Progress
from services.executor.gpu.memory import CudaMemory, GpuMemory, measure
from services.executor.gpu.rehearsal import WARM_TOKENS, Rehearsal
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import CudaStreams, InlineStreams, Streams
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.model.llama import Llama
from services.executor.sampler import Drawing
from shared.errors import InvariantBroken
from shared.logs import get_logger
from shared.messages import Costs

INTERPRETED_ROWS: Final = (2, 4)
"""Of graphs in the interpreter: few, so that steps of both kinds come up in a test."""

_log = get_logger("executor")


class GpuStart:
    """The way from a loaded model to a runner that has everything compiled.

    Args:
        model: a Llama.
        place: a GPU, or the interpreter of its kernels, whose memory is not measured.
        progress: told what is done.
    """

    def __init__(self, model: DecoderModel, place: Place, progress: Progress) -> None:
        if not isinstance(model, Llama):
            raise InvariantBroken(f"a GPU runs no {type(model).__name__}")
        self._model = model
        self._progress = progress
        self._is_gpu = place is Place.GPU
        self._streams: Streams = InlineStreams()
        self._graph_rows = INTERPRETED_ROWS
        if self._is_gpu:
            self._streams = CudaStreams(torch.device("cuda"))
            self._graph_rows = GRAPH_ROWS
        self._memory: GpuMemory | None = None

    def bytes_for_pool(
        self, block_size: int, max_model_len: int | None, utilization: float
    ) -> int | None:
        """What the KV pool may take of a GPU's memory, no pool made yet; None: there is no GPU.

        Raises: StartError if nothing is left for it.
        """
        if not self._is_gpu:
            return None
        self._progress("measuring the GPU's memory")
        longest = max_model_len or self._model.shape.max_position_embeddings
        device = CudaMemory(self._streams.device)
        self._memory = measure(self._model, block_size, longest, self._streams, device)
        _log.info(
            "gpu_memory", total_bytes=self._memory.total, used_bytes=self._memory.used,
            step_bytes=self._memory.step, graphs_bytes=self._memory.graphs,
        )  # fmt: skip
        return self._memory.for_pool(utilization)

    def runner(
        self, pools: KVPools, max_model_len: int, block_bytes: int, drawing: Drawing | None
    ) -> tuple[GpuRunner, Costs]:
        """A runner whose first plan compiles nothing, and what giving way costs by it."""
        runner = self._captured(pools, max_model_len, drawing)
        self._progress("warming up")
        vocab_size = self._model.shape.vocab_size
        rehearsal = Rehearsal(runner, pools, vocab_size, max_model_len)
        rehearsal.warm_up(LONGEST_PROMPT if self._is_gpu else WARM_TOKENS)
        self._progress("measuring")
        return runner, rehearsal.costs(block_bytes)

    def _captured(self, pools: KVPools, max_model_len: int, drawing: Drawing | None) -> GpuRunner:
        """A runner with its graphs; what they took is told beside what was set aside for them."""
        began = time.monotonic()
        device = CudaMemory(self._streams.device) if self._is_gpu else None
        before = device.free_bytes() if device is not None else 0
        runner = GpuRunner(
            *(self._model, pools, self._streams, max_model_len, drawing, self._graph_rows)
        )
        runner.capture(self._progress)
        taken = before - device.free_bytes() if device is not None else 0
        _log.info(
            "graphs_captured", graphs=runner.graphs.num_captured, taken_bytes=taken,
            set_aside_bytes=self._memory.graphs if self._memory is not None else 0,
            took_s=round(time.monotonic() - began, 2),
        )  # fmt: skip
        return runner
