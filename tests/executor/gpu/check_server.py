"""An executor over a GPU's kernels, from its start to its first tokens, in this process."""

import pytest

from services.executor.gpu.start import GpuStart
from shared.messages import StepResult
from shared.settings import ExecutorSettings
from tests.executor.beams.models import CONFIG, write_random
from tests.executor.plans import plan, row
from tests.executor.test_server import running

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # keys and values, layers, heads, numbers, tokens, float32


@pytest.fixture
def settings(tmp_path):
    write_random(tmp_path)
    return ExecutorSettings(
        model=str(tmp_path), device="interpreter", step_endpoint=f"ipc://{tmp_path}/steps.ipc"
    )


async def test_its_pool_takes_what_the_gpu_has_for_it_and_its_costs_are_measured(
    settings, monkeypatch
):
    """As if its memory had room for 1,000 blocks and a half; main memory has none of them."""
    asked = []

    def room(self, *what):
        asked.append(what)
        return 1000 * BLOCK_BYTES + BLOCK_BYTES // 2

    monkeypatch.setattr(GpuStart, "bytes_for_pool", room)
    monkeypatch.setattr("services.executor.server.measure_costs", None)  # the CPU's
    async with running(settings) as (scheduler, _, _):
        ready = await scheduler.adopt()
        assert asked == [(settings.block_size, None, settings.gpu_memory_utilization)]
        assert ready.costs.block_bytes == BLOCK_BYTES
        assert ready.num_gpu_blocks == 1000
        longest = CONFIG["max_position_embeddings"]
        assert ready.num_cpu_blocks == 256 * longest // settings.block_size
        assert min(ready.costs.copy_bytes_per_s, ready.costs.prefill_tokens_per_s) > 0
        (result,) = await scheduler.run(plan(row((5, 6, 7), 0, (999,))))
        assert isinstance(result, StepResult)
