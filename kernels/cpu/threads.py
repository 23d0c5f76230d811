"""The threads that run compiled bodies; see `team.py` for how they work together."""

import atexit
import ctypes
import os
import signal
from functools import cache
from typing import Final

import torch

from kernels.cpu import arguments as words
from kernels.cpu.code import Body, bodies

SPINS: Final = 4000
"""Pauses before a waiting thread gives its core away: about 50 us, longer than between two bodies
of a step, shorter than anybody notices."""

_CACHE_LINE: Final = 64


class Team:
    """The calling thread and its followers. One thread at a time may run bodies."""

    def __init__(self) -> None:
        code = bodies("team")
        self._lead, self._follow = code["lead"], code["follow"]
        self._memory = (ctypes.c_int64 * (words.TEAM_WORDS + _CACHE_LINE // 8))()
        address = ctypes.addressof(self._memory)
        self._address = -(-address // _CACHE_LINE) * _CACHE_LINE
        self._block = (ctypes.c_int64 * words.TEAM_WORDS).from_address(self._address)
        self._block[words.T_SPINS] = SPINS
        self._followers: list[ctypes.c_ulong] = []
        self._owner = os.getpid()
        atexit.register(self._stop)

    def run(self, body: Body, block: int, threads: int) -> None:
        """Run `body` with the argument block at address `block` on up to `threads` threads."""
        if threads == 1:
            body.run_here(block)
            return
        if len(self._followers) < threads - 1:
            self._hire(threads - 1)
        self._block[words.T_BODY] = body.address
        self._block[words.T_BLOCK] = block
        self._block[words.T_LIMIT] = threads - 1
        self._lead.run_here(self._address)

    def _hire(self, count: int) -> None:
        """Start followers, as threads that Python knows nothing of and signals do not reach."""
        libc = ctypes.CDLL(None)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while len(self._followers) < count:
                thread = ctypes.c_ulong()
                function, block = (
                    ctypes.c_void_p(x) for x in (self._follow.address, self._address)
                )
                failed = libc.pthread_create(ctypes.byref(thread), None, function, block)
                if failed:
                    raise OSError(failed, f"cannot start a thread: {os.strerror(failed)}")
                self._followers.append(thread)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _stop(self) -> None:
        """End the followers while their code is still in memory."""
        if os.getpid() != self._owner:  # a fork has none
            return
        self._block[words.T_STOP] = 1
        self._block[words.T_LIMIT] = 0
        self._block[words.T_BODY] = bodies("team")["nothing"].address
        self._lead.run_here(self._address)  # wakes the sleepers
        for thread in self._followers:
            ctypes.CDLL(None).pthread_join(thread, None)
        self._followers.clear()


@cache
def the_team() -> Team:
    """This process's team."""
    return Team()


def num_threads() -> int:
    """Threads to run a body on: as many as torch uses."""
    return torch.get_num_threads()
