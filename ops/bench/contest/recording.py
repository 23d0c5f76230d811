"""`splitflap up`, but every plan that its executor carries out is written down: for server_cost.py.

    python -m ops.bench.contest.recording FILE up [flags of `splitflap up`]

The supervisor is the real one; only where it would start `services.cli executor`, it starts this
module, which is the same executor with a recorder around its `Interpreter`. What is recorded of a
plan is its message, as it is, and when its computing began and ended (time.perf_counter, on Linux
the same clock in all processes). It is kept in memory and written when the executor ends, so that
a step costs two looks at the clock more than it does anyway.
"""

import asyncio
import functools
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services import cli
from services.executor.interpreter import Interpreter, Pending
from shared.child_process import command
from shared.codec import decode, encode
from shared.messages import StepFailed, StepPlan, StepResult


@dataclass(frozen=True)
class Recorded:
    """One plan, and when it was carried out."""

    plan: StepPlan
    began_s: float
    ended_s: float


def record(interpreter: type[Interpreter], plans: list[Recorded]) -> None:
    """From now on every plan that interpreters of this class carry out is appended to `plans`."""
    launch, finish = interpreter.launch, interpreter.finish
    began_s: dict[int, float] = {}

    def launching(self: Interpreter, plan: StepPlan) -> Pending:
        at_s = time.perf_counter()
        pending = launch(self, plan)
        began_s[id(pending)] = at_s
        return pending

    def finishing(self: Interpreter, pending: Pending) -> StepResult | StepFailed:
        result = finish(self, pending)
        ended_s = time.perf_counter()
        plans.append(Recorded(pending.plan, began_s.pop(id(pending)), ended_s))
        return result

    interpreter.launch = launching  # type: ignore[method-assign]
    interpreter.finish = finishing  # type: ignore[method-assign]


def write(plans: Sequence[Recorded], path: Path) -> None:
    """A line of times and length, then the message's own bytes, for each plan."""
    half_written = path.with_suffix(".part")
    with half_written.open("wb") as file:
        for recorded in plans:
            message = encode(recorded.plan)
            head = f"{recorded.began_s!r} {recorded.ended_s!r} {len(message)}\n"
            file.write(head.encode() + message)
    half_written.rename(path)


def read(path: Path) -> Iterator[Recorded]:
    """What `write` wrote."""
    with path.open("rb") as file:
        while head := file.readline():
            began_s, ended_s, length = head.split()
            plan = decode(file.read(int(length)), (StepPlan,))
            yield Recorded(plan, float(began_s), float(ended_s))


def start_recorders(path: Path) -> None:
    """From now on the executors that this process starts are recording ones."""
    start = asyncio.create_subprocess_exec

    @functools.wraps(start)
    def starting(*given: str, **how: Any) -> Coroutine[Any, Any, Process]:
        return start(*_with_recorder(given, path), **how)

    asyncio.create_subprocess_exec = starting


def _with_recorder(given: Sequence[str], path: Path) -> list[str]:
    """A command of the supervisor's, with this module instead of the executor.

    >>> _with_recorder(command("services.cli", "executor", "--threads=2"), Path("plans"))[1:]
    ['-P', '-m', 'ops.bench.contest.recording', 'plans', 'executor', '--threads=2']
    >>> _with_recorder(command("services.cli", "gateway"), Path("plans"))[1:]
    ['-P', '-m', 'services.cli', 'gateway']
    """
    executor = command("services.cli", "executor")
    if list(given[: len(executor)]) != executor:
        return list(given)
    return command("ops.bench.contest.recording", str(path), *given[len(executor) - 1 :])


def main() -> None:
    """Run the command; an executor writes when it ends."""
    path, service, *flags = sys.argv[1:]
    if service == "up":
        start_recorders(Path(path))
        sys.exit(cli.main([service, *flags]))
    plans: list[Recorded] = []
    record(Interpreter, plans)
    try:
        status = cli.main([service, *flags])
    finally:
        write(plans, Path(path))
    sys.exit(status)


if __name__ == "__main__":
    main()
