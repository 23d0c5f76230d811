"""One small model twice: over the reference on the CPU, and as a GPU runs it, interpreted."""

from dataclasses import dataclass

import torch

from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import Gpu, TritonKernels
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import InlineStreams
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.llama import Llama
from shared.messages import StepResult
from tests.kernels.decoders import Sizes, random_decoder

SIZES = Sizes(hidden=32, inner=48, heads=4, kv_heads=2, head_dim=16, layers=1, vocab=61)
BLOCK_SIZE, NUM_BLOCKS, NUM_ASIDE, LONGEST = 4, 24, 8, 600


@dataclass
class Machine:
    """An interpreter, and what it runs."""

    interpreter: Interpreter
    pools: KVPools
    runner: GpuRunner | None = None

    def run(self, *plans):
        """The results of plans that must succeed."""
        results = [self.interpreter.run(plan) for plan in plans]
        assert all(isinstance(result, StepResult) for result in results), results
        return results


def pools_of(model: Llama, num_blocks: int = NUM_BLOCKS) -> KVPools:
    pools = KVPools(model, num_blocks, BLOCK_SIZE, NUM_ASIDE)
    for pool in (pools.gpu, pools.cpu):
        pool.fill_(float("nan"))
    return pools


def plain(sizes: Sizes = SIZES) -> Machine:
    """What is obviously right."""
    model = random_decoder(ReferenceKernels(torch.float32), sizes)
    pools = pools_of(model)
    return Machine(Interpreter(model, pools, LONGEST), pools)


def gpu(graph_rows=(), streams=None, sizes: Sizes = SIZES, num_blocks=NUM_BLOCKS) -> Machine:
    """What a GPU does."""
    model = random_decoder(TritonKernels(torch.float32, Gpu()), sizes)
    pools = pools_of(model, num_blocks)
    runner = GpuRunner(model, pools, streams or InlineStreams(), LONGEST, graph_rows=graph_rows)
    if graph_rows:
        runner.capture(lambda phase: None)
    return Machine(Interpreter(model, pools, LONGEST, runner=runner), pools, runner)
