"""`python -m kernels.cpu.warm_up`: make what this CPU will need, so that no start waits.

The native library if there is a C++ compiler; else numba's machine code, which takes its place.
"""

import torch

from kernels.cpu.code import bodies, kind_of
from kernels.cpu.native.build import NotBuilt, library
from kernels.select import default_dtype
from shared.logs import get_logger

log = get_logger("kernels")


def main() -> None:
    """Fill the cache."""
    try:
        log.info("native_kernels_ready", path=str(library(retry=True)))
    except NotBuilt as reason:
        log.warning("native_kernels_unavailable", why=str(reason), instead="numba's machine code")
        bodies("team")
        for dtype in {default_dtype(torch.device("cpu")), torch.float32}:
            bodies(kind_of(dtype))


if __name__ == "__main__":
    main()
