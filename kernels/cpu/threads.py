"""Work on all cores in the thread pool that torch already has.

torch's matrix products run in an OpenMP pool. A second pool beside it (numba's, say) would fight
for the same cores with threads that spin while they wait, so our bodies join torch's: the symbol
GOMP_parallel of the OpenMP library torch has loaded runs a function on every thread of a team.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.code import Body
from shared.logs import get_logger

log = get_logger("kernels")

Run = Callable[[Body, int, int], None]
"""(body, address of its argument block, number of threads): runs it until it is done."""


@cache
def team_runner() -> Run:
    """What runs a body on a team of torch's threads, the calling one among them."""
    team = _openmp_team()
    if team is None:
        log.warning("openmp_not_found", effect="attention runs on one thread")
        return lambda body, arguments, threads: body.run_here(arguments)
    return lambda body, arguments, threads: team(body.address, arguments, threads, 0)


def _openmp_team() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the library torch has loaded."""
    torch.get_num_threads()  # loads it, if torch had not yet
    for library in _openmp_libraries():
        try:
            team = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        team.restype = None
        found: Callable[[int, int, int, int], None] = team
        return found
    return None


def _openmp_libraries() -> list[str]:
    """OpenMP libraries mapped into this process, the one beside torch first."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line.rpartition("/")[2]}
    beside_torch = str(Path(torch.__file__).parent)
    return sorted(paths, key=lambda path: (not path.startswith(beside_torch), path))
