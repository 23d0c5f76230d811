"""The `splitflap` command: one subcommand a process, and `up` for all of them together."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final, TypeVar

from shared.errors import InvariantBroken, StartError

if TYPE_CHECKING:
    from shared.settings import (
        CommonSettings,
        ExecutorSettings,
        GatewaySettings,
        SchedulerSettings,
        UpSettings,
    )

# All else is imported by the command that needs it, once Ctrl-C is cared for. Each process imports
# its own room alone: gateway and scheduler run where there is no torch.

EXIT_CANNOT_START: Final = 2  # as argparse; the supervisor does not restart such a child
EXIT_BUG: Final = 70  # sysexits.h, EX_SOFTWARE
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell has it

USAGE: Final = """usage: splitflap COMMAND [settings]

  up          gateway, scheduler and executor on this machine, supervised
  gateway     HTTP and server-sent events; needs a scheduler
  scheduler   blocks, queues and plans; gateways and an executor come to it
  executor    the model and its KV pool; needs a scheduler
  keys        make API keys for clients, and keys for links beyond one machine
  bench       load any OpenAI-compatible server and report how fast it is
  version     print the version

Each command lists its settings with --help.
"""

COMMANDS: Final = ("up", "gateway", "scheduler", "executor", "keys", "bench", "version")
_OTHER_NAMES: Final = {"serve": "up", "start": "up", "run": "up"}

_Settings = TypeVar("_Settings", bound="CommonSettings")


def _up(settings: "UpSettings") -> int:
    import asyncio

    from services.supervisor import supervise

    return asyncio.run(supervise(settings))


def _gateway(settings: "GatewaySettings") -> int:
    import uvloop

    from services.gateway.app import serve

    uvloop.run(serve(settings))
    return 0


def _scheduler(settings: "SchedulerSettings") -> int:
    import uvloop

    from services.scheduler.process import serve

    uvloop.run(serve(settings))
    return 0


def _executor(settings: "ExecutorSettings") -> int:
    from services.executor.server import serve

    serve(settings)
    return 0


def _bench(arguments: Sequence[str]) -> int:
    from services.bench.main import main as bench

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it has a result to write
    return bench(arguments)


def _keys(arguments: Sequence[str]) -> int:
    from services.keys import main as keys

    return keys(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 (cannot start as configured) or 70 (our bug).

    A bench of which nothing succeeded ends with 1.
    """
    if arguments is None:
        signal.signal(signal.SIGINT, _leave)  # until a service has its own way to end
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0], given[1:]) if given else ("", [])
    try:
        return _carry_out(command, rest)
    except StartError as error:
        sys.stderr.write(f"splitflap {command}: {error}\n")
        return EXIT_CANNOT_START
    except InvariantBroken:
        return _bug()
    except BaseExceptionGroup as group:  # of the tasks of a service
        if group.subgroup(InvariantBroken) is None:
            raise
        return _bug()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _carry_out(command: str, rest: Sequence[str]) -> int:
    match command:
        case "version" | "--version":
            from shared.version import VERSION

            sys.stdout.write(VERSION + "\n")
            return 0
        case "help" | "--help" | "-h":
            sys.stdout.write(USAGE)
            return 0
        case "bench":
            return _bench(rest)
        case "keys":
            return _keys(rest)
        case "up" | "gateway" | "scheduler" | "executor":
            return _service(command, rest)
    sys.stderr.write(f"splitflap: {_no_command(command)}\n{USAGE}")
    return EXIT_CANNOT_START


def _service(command: str, rest: Sequence[str]) -> int:
    from shared.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, UpSettings

    match command:
        case "up":
            return _run(command, UpSettings, _up, rest)
        case "gateway":
            return _run(command, GatewaySettings, _gateway, rest)
        case "scheduler":
            return _run(command, SchedulerSettings, _scheduler, rest)
    return _run(command, ExecutorSettings, _executor, rest)


def _no_command(given: str) -> str:
    from difflib import get_close_matches

    if not given:
        return "give a command"
    near = _OTHER_NAMES.get(given) or next(iter(get_close_matches(given, COMMANDS, 1)), None)
    hint = f"; did you mean {near}?" if near else ""
    return f"no such command: {given}{hint}"


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Ctrl-C while modules are being imported: nothing has begun, and no traceback helps."""
    os._exit(EXIT_INTERRUPTED)


def _bug() -> int:
    """An exception is being handled that tells of one."""
    from shared.logs import get_logger

    get_logger("cli").exception("invariant_broken")
    return EXIT_BUG


def _run(
    command: str,
    settings_class: "type[_Settings]",
    serve: "Callable[[_Settings], int]",
    arguments: Sequence[str],
) -> int:
    from shared.logs import configure_logs
    from shared.settings import load

    settings = load(settings_class, arguments, f"splitflap {command}")
    configure_logs(command, settings.log_level, settings.log_format)
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
