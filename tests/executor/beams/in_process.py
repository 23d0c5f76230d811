"""The scheduler's core and the executor's interpreter in one process, without a wire between."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from services.executor.interpreter import Interpreter, Pending
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.scheduler.core.commands import Reply, RunStep
from services.scheduler.core.events import ExecutorJoined, Gateway, RequestArrived, StepFinished
from services.scheduler.core.laws import check_laws
from services.scheduler.core.machine import Scheduler, SchedulerConfig
from shared.ids import Boot, RequestId
from shared.messages import (
    Costs,
    ExecutorReady,
    Finished,
    PositionLogprobs,
    Refused,
    StepPlan,
    StepResult,
    Submit,
    Tokens,
)
from shared.sampling import SamplingParams

GATEWAY = Gateway(b"g")


@dataclass
class Answer:
    """What a gateway was told of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class InProcess:
    """A server without processes: submit, run, and read the answers."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        block_size: int = 16,
        num_cpu_blocks: int = 0,
        interpreter: Interpreter | None = None,
        **config: Any,
    ) -> None:
        """`interpreter` is over pools of these sizes; `config` is the scheduler's."""
        self.answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
        self.num_steps = 0
        self._plans: deque[StepPlan] = deque()
        self.core = Scheduler(SchedulerConfig(Boot(7), **config))
        longest = min(model.shape.max_position_embeddings, num_blocks * block_size)
        if interpreter is None:
            pools = KVPools(model, num_blocks, block_size, num_cpu_blocks)
            interpreter = Interpreter(model, pools, longest)
        self._interpreter = interpreter
        ready = ExecutorReady(
            Boot(9), "tested", model.shape, block_size, num_blocks, num_cpu_blocks, longest,
            (), model.kv_dtype, Costs(64, 1e6, 1e3),
        )  # fmt: skip
        self._handle(ExecutorJoined(0.0, ready))

    def submit(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        """A request arrives."""
        submit = Submit(RequestId(name), prompt, sampling)
        self._handle(RequestArrived(0.0, GATEWAY, submit))

    def run(self) -> None:
        """Steps until nothing is left to do; every law holds after each."""
        pending: deque[Pending] = deque()
        while self._plans or pending:
            while self._plans:
                pending.append(self._interpreter.launch(self._plans.popleft()))
            result = self._interpreter.finish(pending.popleft())
            assert isinstance(result, StepResult), result
            assert not result.row_errors
            self.num_steps += 1
            self._handle(StepFinished(float(self.num_steps), result))
            check_laws(self.core)

    def _handle(self, event: ExecutorJoined | RequestArrived | StepFinished) -> None:
        for command in self.core.handle(event):
            match command:
                case RunStep(plan):
                    self._plans.append(plan)
                case Reply(_, Tokens(items)):
                    for run in items:
                        answer = self.answers[run.request_id, run.sequence]
                        assert run.start == len(answer.token_ids)
                        answer.token_ids += run.token_ids
                        answer.logprobs += run.logprobs
                case Reply(_, Finished() as finished):
                    self.answers[finished.request_id, finished.sequence].finished = finished
                case Reply(_, Refused() as refused):
                    raise AssertionError(refused)
