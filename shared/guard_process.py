"""The guard's own process: `python -m shared.guard_process PID SERVICE FORMAT`, see `guard.py`.

Its input is the pipe of beats: each is a byte, the seconds of silence that are forgiven after it.
It ends with the process it watches, whose end of the pipe is closed then, however that ended.
"""

import os
import select
import signal
import sys
from typing import Final

from shared.logs import configure_logs, get_logger

_SECOND: Final = 1.0


def watch(process: int, service: str) -> None:
    """Until `process`, which must be the parent of this one, ends, or is killed for its silence.

    Silence is counted second by second: if the whole machine stood still, that is one of them.
    """
    forgiven_s = silent_s = 0
    while True:
        if not select.select([0], [], [], _SECOND)[0]:
            silent_s += 1
            if silent_s < forgiven_s or not forgiven_s:
                continue
            if os.getppid() == process:
                get_logger("guard").error(
                    "standstill", killed=service, pid=process, silent_s=silent_s
                )
                os.kill(process, signal.SIGKILL)
            return
        beats = os.read(0, 256)
        if not beats:
            return
        forgiven_s, silent_s = beats[-1], 0


if __name__ == "__main__":
    _, _pid, _service, _format = sys.argv
    configure_logs(_service, log_format="json" if _format == "json" else "console")
    watch(int(_pid), _service)
