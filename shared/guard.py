"""What a process starts to be ended by if it stands still: somebody else must, for it cannot.

A stopped process (SIGSTOP, a debugger) and one that hangs inside native code hear no signal but
SIGKILL, and whoever started them waits for their end. So each service has a guard: a small process
that it beats to through a pipe, and that kills it when the beats stay away. Whoever restarts what
dies, `splitflap up` or an engine of containers, then does.
"""

import asyncio
import contextlib
import os
import subprocess
from types import TracebackType
from typing import Final, Literal, Self

from shared.child_process import command, environment
from shared.logs import get_logger

LOADING_S: Final = 60
"""Seconds without a beat that are forgiven while a process starts: it may load and compile."""
BEAT_S: Final = 1.0
STANDSTILL_S: Final = 10
"""The same of a process that serves. Whoever talks to it has given it up after 3 s of silence."""

_log = get_logger("guard")


class Guard:
    """Watches the process that makes it, until that ends or closes it.

    `beat` may be called from any thread, but not after `close`.
    """

    def __init__(self, service: str, log_format: Literal["console", "json"] = "console") -> None:
        """Start it. The first beat is owed within `LOADING_S`."""
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)  # a guard that is stopped itself stops nobody
        try:
            self._process = subprocess.Popen(
                command("shared.guard_process", str(os.getpid()), service, log_format),
                stdin=reader,
                stdout=subprocess.DEVNULL,
                env=environment(os.environ),
                start_new_session=True,  # Ctrl-C is for the one it watches
            )
        finally:
            os.close(reader)
        self._is_lost = False
        self.beat(LOADING_S)

    def beat(self, silence_s: int = STANDSTILL_S) -> None:
        """I live. If no beat follows for `silence_s` (1 to 255), end me."""
        if self._is_lost:
            return
        try:
            with contextlib.suppress(BlockingIOError):  # it has more beats than it reads
                os.write(self._pipe, bytes([silence_s]))
        except BrokenPipeError:
            self._is_lost = True
            _log.warning("guard_lost", why="its process has gone; nobody ends this one if it hangs")

    def close(self) -> None:
        """Nobody watches from now on."""
        os.close(self._pipe)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def keep_beating(self) -> None:
        """Until cancelled, from an event loop: if that is blocked, it stands still too."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)
