"""The guard's own process: `python -m shared.guard_process PID SERVICE FORMAT`, see `guard.py`.

Its input is the pipe of beats: each is a byte, the seconds of silence that are forgiven after it.
It ends with the process it watches, whose end of the pipe is closed then, however that ended.
"""

import os
import select
import signal
import sys
from typing import Final

_SECOND: Final = 1.0


def watch(process: int) -> int:
    """Until `process`, which must be the parent of this one, ends, or is killed for its silence.

    Returns: the seconds it was killed for; 0 if it was not.

    Silence is counted second by second: if the whole machine stood still, that is one of them.
    """
    forgiven_s = silent_s = 0
    while True:
        if not select.select([0], [], [], _SECOND)[0]:
            silent_s += 1
            if silent_s < forgiven_s or not forgiven_s:
                continue
            if os.getppid() != process:
                return 0
            os.kill(process, signal.SIGKILL)
            return silent_s
        beats = os.read(0, 256)
        if not beats:
            return 0
        forgiven_s, silent_s = beats[-1], 0


def tell(process: int, service: str, log_format: str, silent_s: int) -> None:
    """A line in the log of whom it killed."""
    # Here, as it takes twice the memory and thrice the start, and is hardly ever needed.
    from shared.logs import configure_logs, get_logger

    configure_logs(service, log_format="json" if log_format == "json" else "console")
    get_logger("guard").error("standstill", killed=service, pid=process, silent_s=silent_s)


if __name__ == "__main__":
    _, _pid, _service, _format = sys.argv
    if _silent_s := watch(int(_pid)):
        tell(int(_pid), _service, _format, _silent_s)
