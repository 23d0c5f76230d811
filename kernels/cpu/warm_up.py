"""`python -m kernels.cpu.warm_up`: compile what this CPU will need, so that no start waits."""

import torch

from kernels.cpu.code import bodies
from kernels.select import default_dtype


def main() -> None:
    """Fill the cache for the default dtype and for float32."""
    for is_bf16 in {default_dtype(torch.device("cpu")) == torch.bfloat16, False}:
        bodies(is_bf16)


if __name__ == "__main__":
    main()
