"""The scheduler's core and the executor's interpreter in one process: no sockets, no gateway."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from services.executor.gpu.gpu_step import GpuStep, Marks
from services.executor.gpu.runner import GpuRunner
from services.executor.gpu.streams import CudaStreams, Event, InlineStreams, Streams
from services.executor.interpreter import Interpreter, Pending
from services.executor.kv_pool import KVPools
from services.executor.model.llama import Llama
from services.scheduler.core.commands import Command, Reply, RunStep
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.events import ExecutorJoined, Gateway, RequestArrived, StepFinished
from services.scheduler.core.machine import Scheduler
from shared.ids import Boot, RequestId
from shared.messages import (
    Costs,
    ExecutorReady,
    Finished,
    Refused,
    StepPlan,
    StepResult,
    StepTimings,
    Submit,
    Tokens,
)
from shared.sampling import SamplingParams

_GATEWAY = Gateway(b"check")
_BOOT = Boot(1)


@dataclass(frozen=True)
class Wish:
    """One request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Step:
    """One plan that was carried out.

    Attributes:
        num_keys: that its rows attended to, their own tokens included.
        marks: its points in the device's streams; None on the CPU.
    """

    num_rows: int
    num_tokens: int
    num_keys: int
    timings: StepTimings
    marks: Marks | None

    @property
    def is_decode(self) -> bool:
        """Whether every row had one new token."""
        return self.num_tokens == self.num_rows

    @property
    def begun(self) -> Event:
        """When the device came to its forward pass. Raises: ValueError if it ran none."""
        if self.marks is None or self.marks.passing is None:
            raise ValueError("a step of the CPU, or without rows, has no marks of a forward pass")
        return self.marks.passing

    @property
    def ended(self) -> Event:
        """When the device was through with it. Raises: ValueError if it ran on the CPU."""
        if self.marks is None or self.marks.drawn is None:
            raise ValueError("a step of the CPU has no marks")
        return self.marks.drawn


@dataclass
class Served:
    """What came of it: tokens by (request, sequence), and every step."""

    counters: Counters
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Hands:
    """An executor without its process.

    Args:
        num_blocks: of the pool and of the one for swapped blocks.
        streams: of the device; None: the CPU carries plans out, at once.
        graph_rows: numbers of rows that get a CUDA graph.
    """

    def __init__(
        self,
        model: Llama,
        num_blocks: tuple[int, int],
        block_size: int,
        streams: Streams | None = None,
        graph_rows: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.pools = KVPools(model, num_blocks[0], block_size, num_blocks[1])
        self.longest = model.shape.max_position_embeddings
        self.runner: GpuRunner | None = None
        if streams is not None:
            self.runner = GpuRunner(model, self.pools, streams, self.longest, graph_rows=graph_rows)
            if graph_rows:
                self.runner.capture(lambda phase: None)
        self.interpreter = Interpreter(model, self.pools, self.longest, runner=self.runner)

    def ready(self) -> ExecutorReady:
        """What an executor says of itself."""
        pools = self.pools
        return ExecutorReady(
            boot=_BOOT,
            model="random",
            shape=self.model.shape,
            block_size=pools.block_size,
            num_gpu_blocks=pools.num_gpu_blocks,
            num_cpu_blocks=pools.num_cpu_blocks,
            max_model_len=self.longest,
            eos_token_ids=(),
            kv_dtype=self.model.kv_dtype,
            costs=Costs(self.model.kv_bytes_per_token * pools.block_size, 0.0, 0.0),
        )


def streams_of(device: torch.device) -> Streams:
    """A GPU's, or those of kernels that are interpreted."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()


def serve(hands: Hands, wishes: Sequence[Wish], **config: object) -> Served:
    """Serve all of them, as fast as it goes, to their ends.

    Args:
        config: of the scheduler.
    Raises: StepBroken, RequestBroken.
    """
    scheduler = Scheduler(SchedulerConfig(boot=_BOOT, **config))  # type: ignore[arg-type]
    served = Served(scheduler.counters)
    pending: deque[tuple[StepPlan, Pending]] = deque()

    def carry_out(commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case RunStep(plan):
                    pending.append((plan, hands.interpreter.launch(plan)))
                case Reply(message=message):
                    _take(message, served)

    carry_out(scheduler.handle(ExecutorJoined(time.perf_counter(), hands.ready())))
    for i, wish in enumerate(wishes):
        submit = Submit(RequestId(f"r{i}"), wish.prompt, wish.sampling)
        carry_out(scheduler.handle(RequestArrived(time.perf_counter(), _GATEWAY, submit)))
    while pending:
        plan, launched = pending.popleft()
        result = hands.interpreter.finish(launched)
        now = time.perf_counter()
        if not isinstance(result, StepResult):
            raise StepBroken(f"step {plan.step_id}: {result.message}")
        served.steps.append(_step(plan, launched, result.timings))
        carry_out(scheduler.handle(StepFinished(now, result)))
    return served


class StepBroken(Exception):
    """The executor refused a plan, or could not carry it out."""


class RequestBroken(Exception):
    """The scheduler refused a request, or it ended by an error."""


def _step(plan: StepPlan, pending: Pending, timings: StepTimings) -> Step:
    counts = [len(row.token_ids) for row in plan.rows]
    num_keys = sum(row.first_position for row in plan.rows) + sum(counts)
    launched = pending.launched
    marks = launched.marks if isinstance(launched, GpuStep) else None
    return Step(len(counts), sum(counts), num_keys, timings, marks)


def _take(message: object, served: Served) -> None:
    """What a gateway would hear. Raises: RequestBroken."""
    match message:
        case Tokens(items):
            for run in items:
                text = served.tokens.setdefault((run.request_id, run.sequence), [])
                text[run.start :] = run.token_ids
        case Refused() | Finished(error=str()):
            raise RequestBroken(str(message))
        case _:
            pass


def random_prompt(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Token ids."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (length,), generator=random).tolist())
