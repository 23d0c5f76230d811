"""What a GPU's kernels are compiled for by a plan, and that all of it was compiled before.

Triton compiles a kernel anew for each set of what it knows beforehand: constants, dtypes, which
numbers are 1 or divide by 16. Its own hook is asked here before each compilation, says that
somebody else does it, and keeps the list. Nothing runs, so what is drawn means nothing.
"""

import pytest
import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from services.executor.gpu.rehearsal import WARM_TOKENS, Rehearsal
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import InlineStreams
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from shared.messages import Move, Score, StepResult
from shared.sampling import DrawParams
from tests.executor.plans import plan, row, sample
from tests.kernels.decoders import Sizes, random_decoder

pytestmark = pytest.mark.triton

SIZES = Sizes(hidden=64, inner=64, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=67)
LONGEST, BLOCK_SIZE, NUM_BLOCKS = 1000, 16, 80
ALL = {"attention_kernel", "copy_kernel", "fold_kernel", "sample_kernel", "write_kernel"}


@pytest.fixture
def compiled(monkeypatch):
    """(kernel, what it would be compiled for), for an H200."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from ops.gpu.compiled import NoGpu

    keys = set()

    def note(*, key, fn, **_):
        keys.add((fn.name, key))
        return True

    monkeypatch.setattr(driver, "_active", NoGpu(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    return keys


def story():
    """Prompts, long and short, alone and with others; decoding, in splits and not; all draws."""
    table = tuple(range(63))
    drawn = [sample(3, DrawParams(temperature=0.8, top_p=0.9), seed=3)]
    told = [sample(4, DrawParams(frequency_penalty=0.5), history=(1, 2), num_prompt=1, num_top=2)]
    return [
        plan(row(tuple(range(60)), 0, table[:4], 1), step_id=1),
        plan(row((5,), 0, (70,), 1), step_id=2),
        plan(row((5,), 60, (64, 65, 66, 67), 1), row((1, 2, 3), 900, table, 2), step_id=3),
        plan(row((5,), 950, table, 1), row((6,), 20, (70, 71), 3, drawn), step_id=4),
        plan(*(row((5,), 20 + i, (64 + 2 * i, 65 + 2 * i), 10 + i) for i in range(5)), step_id=5),
        plan(row((7,), 990, table, 1), row((1, 2), 0, (72,), 4, told), step_id=6),
        plan(
            row(tuple(range(33)), 0, (73, 74, 75), 1, score=Score(0, (1, 2), 1)),
            step_id=7, copies=(Move(70, 76), Move(71, 77), Move(72, 78)),
            swap_out=(Move(60, 0), Move(61, 1)), swap_in=(Move(2, 79),),
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_runner_that_was_warmed_up_compiles_nothing_more(compiled, dtype):
    model = random_decoder(TritonKernels(dtype, Gpu()), SIZES)
    pools = KVPools(model, NUM_BLOCKS, BLOCK_SIZE, 4)
    runner = GpuRunner(model, pools, InlineStreams(), LONGEST, graph_rows=(1, 2, 4))
    runner.capture(lambda phase: None)
    Rehearsal(runner, pools, SIZES.vocab, LONGEST).warm_up(WARM_TOKENS)
    assert {name for name, _ in compiled} == ALL
    before = set(compiled)
    interpreter = Interpreter(model, pools, LONGEST, runner=runner)
    results = [interpreter.run(each) for each in story()]
    assert [made for made in results if not isinstance(made, StepResult)] == []
    assert runner.graphs.num_replayed > 1
    assert [name for name, _ in compiled - before] == []
