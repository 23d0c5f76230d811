"""`python -m tests.stack.faulty_executor FAULT FOLDER FLAGS...`: an executor with a fault.

poison    dies at each plan whose rows hold `POISON`
in-swap-out, in-swap-in    dies in the middle of the first such moves of two blocks and more
hang      the thread that computes stops for good at the first plan; all else goes on

But for poison a fault strikes once: a file in FOLDER says that it did.
"""

import os
import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path

from services.executor import server
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from shared.logs import configure_logs
from shared.settings import ExecutorSettings, load

POISON = (301, 300)  # ids that the toy never writes by itself


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Fault:
    """What goes wrong here, and whether it did."""

    def __init__(self, name, folder):
        self.name = name
        self._mark = Path(folder) / f"struck-{name}"

    def strikes(self, name):
        """Whether `name` goes wrong now."""
        if name != self.name or self._mark.exists():
            return False
        self._mark.touch()
        return True


def with_fault(fault):
    """(interpreter, pools) that have it."""

    class FaultyInterpreter(Interpreter):
        def launch(self, plan):
            rows = (row.token_ids for row in plan.rows)
            if fault.name == "poison" and any(POISON in pairwise(ids) for ids in rows):
                die()
            if fault.strikes("hang"):
                threading.Event().wait()
            return super().launch(plan)

    class FaultyPools(KVPools):
        def swap_out(self, moves):
            self._die_in("in-swap-out", moves, super().swap_out)

        def swap_in(self, moves):
            self._die_in("in-swap-in", moves, super().swap_in)

        def _die_in(self, name, moves, carry_out):
            if len(moves) > 1 and fault.strikes(name):
                carry_out(moves[: len(moves) // 2])
                die()
            carry_out(moves)

    return FaultyInterpreter, FaultyPools


def main(name, folder, *flags):
    settings = load(ExecutorSettings, flags, "faulty executor")
    configure_logs("executor", settings.log_level, settings.log_format)
    server.Interpreter, server.KVPools = with_fault(Fault(name, folder))
    server.serve(settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
