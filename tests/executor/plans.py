"""Short ways to write plans in tests."""

from services.executor.plan_check import PlanLimits
from shared.messages import Row, Sample, StepPlan
from shared.sampling import DrawParams

BOOT = 7
GREEDY = DrawParams(temperature=0.0)
LIMITS = PlanLimits(
    num_gpu_blocks=8, num_cpu_blocks=4, block_size=4, max_model_len=24, vocab_size=512
)


def sample(sequence_id=1, draw=GREEDY, **more):
    """A sample, greedy unless said otherwise."""
    return Sample(**{"sequence_id": sequence_id, "index": 0, "seed": 0, "draw": draw, **more})


def report(sequence_id=1, **more):
    """A sample that draws nothing: two likeliest tokens, unless said otherwise."""
    return sample(sequence_id, **{"draw": None, "num_top": 2, **more})


def row(token_ids=(65,), first_position=0, block_table=(0,), sequence_id=1, samples=None, **more):
    """A row that draws its sequence's next token, unless said otherwise."""
    return Row(
        sequence_id=sequence_id,
        token_ids=tuple(token_ids),
        first_position=first_position,
        block_table=tuple(block_table),
        samples=(sample(sequence_id),) if samples is None else tuple(samples),
        **more,
    )


def plan(*rows, step_id=1, **more):
    """A plan of the test scheduler."""
    return StepPlan(boot=BOOT, step_id=step_id, rows=rows, **more)
