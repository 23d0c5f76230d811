"""The `splitflap` command: one subcommand a process, and `up` for all of them together."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import uvloop

from shared.errors import InvariantBroken, StartError
from shared.logs import configure_logs, get_logger
from shared.settings import (
    CommonSettings,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    UpSettings,
    load,
)
from shared.version import VERSION

EXIT_CANNOT_START: Final = 2  # as argparse; the supervisor does not restart such a child
EXIT_BUG: Final = 70  # sysexits.h, EX_SOFTWARE

USAGE: Final = """usage: splitflap COMMAND [settings]

  up          gateway, scheduler and executor on this machine, supervised
  gateway     HTTP and server-sent events; needs a scheduler
  scheduler   blocks, queues and plans; gateways and an executor come to it
  executor    the model and its KV pool; needs a scheduler
  bench       load any OpenAI-compatible server and report how fast it is
  version     print the version

Each command lists its settings with --help.
"""

_Settings = TypeVar("_Settings", bound=CommonSettings)

# Each process imports its own room alone: gateway and scheduler run where there is no torch.


def _up(settings: UpSettings) -> int:
    from services.supervisor import supervise

    return asyncio.run(supervise(settings))


def _gateway(settings: GatewaySettings) -> int:
    from services.gateway.app import serve

    uvloop.run(serve(settings))
    return 0


def _scheduler(settings: SchedulerSettings) -> int:
    from services.scheduler.server import serve

    uvloop.run(serve(settings))
    return 0


def _executor(settings: ExecutorSettings) -> int:
    from services.executor.server import serve

    serve(settings)
    return 0


def _bench(arguments: Sequence[str]) -> int:
    from services.bench.main import main as bench

    return bench(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 (cannot start as configured) or 70 (our bug).

    A bench of which nothing succeeded ends with 1.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0], given[1:]) if given else ("", [])
    try:
        match command:
            case "up":
                return _run(command, UpSettings, _up, rest)
            case "gateway":
                return _run(command, GatewaySettings, _gateway, rest)
            case "scheduler":
                return _run(command, SchedulerSettings, _scheduler, rest)
            case "executor":
                return _run(command, ExecutorSettings, _executor, rest)
            case "bench":
                return _bench(rest)
            case "version" | "--version":
                sys.stdout.write(VERSION + "\n")
                return 0
            case "help" | "--help" | "-h":
                sys.stdout.write(USAGE)
                return 0
        sys.stderr.write(f"splitflap: no such command: {command or '(none)'}\n{USAGE}")
    except StartError as error:
        sys.stderr.write(f"splitflap {command}: {error}\n")
    except InvariantBroken:
        get_logger("cli").exception("invariant_broken")
        return EXIT_BUG
    except BaseExceptionGroup as group:  # of the tasks of a service
        if group.subgroup(InvariantBroken) is None:
            raise
        get_logger("cli").exception("invariant_broken")
        return EXIT_BUG
    except KeyboardInterrupt:
        return 130
    return EXIT_CANNOT_START


def _run(
    command: str,
    settings_class: type[_Settings],
    serve: Callable[[_Settings], int],
    arguments: Sequence[str],
) -> int:
    settings = load(settings_class, arguments, f"splitflap {command}")
    configure_logs(command, settings.log_level, settings.log_format)
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
