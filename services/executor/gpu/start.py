"""What an executor on a GPU has beside one on the CPU, put together."""

import torch

from services.executor.devices import Place
from services.executor.gpu.decode_graphs import GRAPH_ROWS, Progress
from services.executor.gpu.memory import GpuMemory, measure
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import CudaStreams, InlineStreams, Streams
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.model.llama import Llama
from services.executor.sampler import Drawing
from shared.errors import InvariantBroken

INTERPRETED_ROWS = (2, 4)
"""Of graphs in the interpreter: few, so that steps of both kinds come up in a test."""


def start_runner(
    model: DecoderModel,
    pools: KVPools,
    max_model_len: int,
    drawing: Drawing | None,
    place: Place,
    progress: Progress,
) -> GpuRunner:
    """A runner, its graphs captured."""
    is_gpu = place is Place.GPU
    streams: Streams = CudaStreams(torch.device("cuda")) if is_gpu else InlineStreams()
    sizes = GRAPH_ROWS if is_gpu else INTERPRETED_ROWS
    runner = GpuRunner(_llama(model), pools, streams, max_model_len, drawing, sizes)
    runner.capture(progress)
    return runner


def measure_memory(model: DecoderModel, block_size: int, max_model_len: int | None) -> GpuMemory:
    """Of the GPU, the weights loaded and no pool made."""
    longest = max_model_len or model.shape.max_position_embeddings
    return measure(_llama(model), block_size, longest)


def _llama(model: DecoderModel) -> Llama:
    if not isinstance(model, Llama):
        raise InvariantBroken(f"a GPU runs no {type(model).__name__}")
    return model
