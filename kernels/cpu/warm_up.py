"""`python -m kernels.cpu.warm_up`: compile what this CPU will need, so that no start waits."""

import torch

from kernels.cpu.code import bodies, kind_of
from kernels.select import default_dtype


def main() -> None:
    """Fill the cache for the default dtype and for float32."""
    bodies("team")
    for dtype in {default_dtype(torch.device("cpu")), torch.float32}:
        bodies(kind_of(dtype))


if __name__ == "__main__":
    main()
