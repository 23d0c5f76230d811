"""The executor's hands in a test: an interpreter over small pools."""

import numpy as np

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.messages import StepResult
from tests.executor.plans import LIMITS, plan


class Hands:
    """An interpreter over a toy, and its pools to look into."""

    def __init__(self, model=None):
        self.pools = KVPools(
            model or ToyModel(), LIMITS.num_gpu_blocks, LIMITS.block_size, LIMITS.num_cpu_blocks
        )
        self.failures = []
        self.interpreter = Interpreter(
            model or ToyModel(),
            self.pools,
            LIMITS.max_model_len,
            on_failure=lambda plan, error: self.failures.append((plan.step_id, type(error))),
        )

    def run(self, *rows, step_id=1, **more):
        return self.interpreter.run(plan(*rows, step_id=step_id, **more))

    def draws(self, *rows, **more):
        """{sequence: token} of a plan that must succeed."""
        result = self.run(*rows, **more)
        assert isinstance(result, StepResult), result
        assert not result.row_errors
        return {sampled.sequence_id: sampled.token_id for sampled in result.sampled}

    def memory(self):
        return self.pools.gpu.clone(), self.pools.cpu.clone()


class Feverish(ToyModel):
    """A toy whose logits after token 90 are nonsense."""

    def forward(self, pool, batch):
        logits = super().forward(pool, batch)
        logits[batch.token_ids[batch.logit_tokens] == 90] = np.nan
        return logits
