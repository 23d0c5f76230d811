"""How long the scheduler's mind takes from a step's result to the next plan, encoding apart.

    python -m ops.bench.plan_speed [--sequences 16 64 256 1024] [--plans-in-flight 1]

Sequences of 1,000 tokens decode together; the executor here answers at once, with any token. Time
is processor time, so that other work on the machine does not count. The goal is 1 ms at 256
sequences, and a curve that grows linearly at most.

The last line is of a burst: 256 requests that share a prompt of 4,000 tokens come while the first
of them is computed, and start together at its result.
"""

import argparse
import gc
import time
from statistics import median, quantiles

from services.scheduler.core.commands import RunStep
from services.scheduler.core.events import (
    ExecutorJoined,
    Gateway,
    RequestArrived,
    StepFinished,
)
from services.scheduler.core.machine import Scheduler, SchedulerConfig
from shared.geometry import ModelShape
from shared.ids import Boot, RequestId
from shared.messages import Costs, ExecutorReady, Sampled, StepResult, Submit
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
NUM_TOKENS = 1_000
BURST_REQUESTS, BURST_TOKENS = 256, 4_000
BOOT = Boot(1)


def ready(num_blocks):
    """An executor with so many blocks."""
    shape, costs = ModelShape(1, 1, 1, 8, 8, 512, 8192), Costs(64, 1e9, 1e3)
    return ExecutorReady(
        Boot(2), "toy", shape, BLOCK_SIZE, num_blocks, 0, 8192, (0,), "int32", costs
    )


def result_of(plan):
    """Any token for whoever draws one."""
    sampled = tuple(
        Sampled(ask.sequence_id, 7 + plan.step_id % 50) for row in plan.rows for ask in row.samples
    )
    return StepResult(plan.boot, plan.step_id, sampled)


class Bench:
    """A scheduler in which `num_sequences` sequences decode."""

    def __init__(self, num_sequences, *, plans_in_flight=1, cache=True, num_steps=300):
        config = SchedulerConfig(
            BOOT,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=16_384 + num_sequences,
            plans_in_flight=plans_in_flight,
            enable_prefix_caching=cache,
            max_num_queued_tokens=2**40,
        )
        self.core = Scheduler(config)
        self.plans, self.seconds = [], []
        num_blocks = num_sequences * (NUM_TOKENS + 2 * num_steps + 300) // BLOCK_SIZE
        self.handle(ExecutorJoined(0.0, ready(num_blocks)))
        for at in range(num_sequences):
            prompt = (at % 500, at // 500, *range(NUM_TOKENS - 2))
            prompt = tuple(token_id % 512 for token_id in prompt)
            params = SamplingParams(max_tokens=2 * num_steps + 200, ignore_eos=True, seed=at)
            submit = Submit(RequestId(f"cmpl-{at:06d}"), prompt, params)
            self.handle(RequestArrived(0.001 * at, Gateway(b"g"), submit))
        while (
            len(self.plans[-1].rows) < num_sequences or len(self.plans[-1].rows[-1].token_ids) > 1
        ):
            self.step()
        self.seconds.clear()
        for _ in range(num_steps):
            self.step()

    def handle(self, event):
        """Give the core one event; keep the plans it sends."""
        for command in self.core.handle(event):
            if isinstance(command, RunStep):
                self.plans.append(command.plan)

    def step(self):
        """Answer the first plan in flight, and take the time of that."""
        in_flight = self.core.steps.in_flight
        event = StepFinished(9.0, result_of(in_flight[0].plan))
        self.plans = self.plans[-2:]
        began = time.thread_time()
        commands = self.core.handle(event)
        self.seconds.append(time.thread_time() - began)
        self.plans += [command.plan for command in commands if isinstance(command, RunStep)]


def burst():
    """Processor seconds of each arrival, and of the step after which they all start."""
    config = SchedulerConfig(BOOT, max_num_seqs=BURST_REQUESTS, max_num_batched_tokens=16_384)
    core = Scheduler(config)
    core.handle(ExecutorJoined(0.0, ready(BURST_REQUESTS * (BURST_TOKENS + 100) // BLOCK_SIZE)))
    prompt = tuple(at % 512 for at in range(BURST_TOKENS))
    seconds = []
    for at in range(BURST_REQUESTS):
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=at)
        submit = Submit(RequestId(f"cmpl-{at:06d}"), prompt, params)
        began = time.thread_time()
        core.handle(RequestArrived(0.001 * at, Gateway(b"g"), submit))
        seconds.append(time.thread_time() - began)
    (first,) = core.steps.in_flight
    event = StepFinished(9.0, result_of(first.plan))
    began = time.thread_time()
    core.handle(event)
    step_s = time.thread_time() - began
    assert len(core.steps.in_flight[0].plan.rows) == BURST_REQUESTS
    return seconds, step_s


def main():
    """Print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--plans-in-flight", type=int, default=1)
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    told = parser.parse_args()
    print(f"{'sequences':>10}{'median ms':>12}{'p90 ms':>10}{'µs a sequence':>16}")
    for num_sequences in told.sequences:
        bench = Bench(
            num_sequences,
            plans_in_flight=told.plans_in_flight,
            cache=not told.no_cache,
            num_steps=told.steps,
        )
        middle, p90 = median(bench.seconds), quantiles(bench.seconds, n=10)[-1]
        print(
            f"{num_sequences:>10}{1e3 * middle:>12.3f}{1e3 * p90:>10.3f}"
            f"{1e6 * middle / num_sequences:>16.2f}"
        )
        del bench
        gc.collect()
    runs = [burst() for _ in range(5)]
    arrival_s = median(median(seconds) for seconds, _ in runs)
    step_s = median(step_s for _, step_s in runs)
    print(
        f"burst of {BURST_REQUESTS}: {1e3 * step_s:.1f} ms for the step that starts them, "
        f"{1e3 * arrival_s:.3f} ms an arrival"
    )


if __name__ == "__main__":
    main()
