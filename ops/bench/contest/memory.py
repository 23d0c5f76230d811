"""Memory of a server's processes, sampled while it works. Linux only."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

EDGES = 2 * 2 * 2**20  # of a pool on huge pages, what may lie in mappings of its own
SAMPLE_S = 2.0  # reading PSS walks page tables: seldom enough not to be felt


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size: pages shared by n processes count 1/n in each."""
    return sum(_field(pid, "smaps_rollup", "Pss:") for pid in pids)


def _field(pid: int, file: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (OSError, ProcessLookupError):  # it ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def resident_in_mappings_of(pids: Iterable[int], at_least: int) -> int:
    """Bytes in memory of mappings of `at_least` so many: of a pool, the part touched so far."""
    total = 0
    for pid in pids:
        size = 0
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue
        for line in lines:
            if line.startswith("Size:"):
                size = 1024 * int(line.split()[1])
            elif line.startswith("Rss:") and size >= at_least:
                total += 1024 * int(line.split()[1])
    return total


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time that processes have used so far."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """A context in which a thread samples now and then, and once more at the end.

    `pool_bytes`: the size of a KV pool that is a mapping of its own, or None: then nothing is
    known of pools, and `peak_without_pool` stays None.
    """

    def __init__(self, pids: Callable[[], list[int]], pool_bytes: int | None = None) -> None:
        self._pids = pids
        self._pool_bytes = pool_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.peak = 0
        self.peak_without_pool: int | None = None

    def sample(self) -> None:
        """Look now."""
        pids = self._pids()
        now = pss_bytes(pids)
        self.peak = max(self.peak, now)
        if self._pool_bytes is not None:
            rest = now - resident_in_mappings_of(pids, self._pool_bytes - EDGES)
            self.peak_without_pool = max(self.peak_without_pool or 0, rest)

    def _work(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.sample()

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *story: object) -> None:
        self._over.set()
        self._thread.join()
        self.sample()
