"""Is Splitflap right and fast on this GPU? One script, under ten minutes.

    python ops/gpu_check.py [--dry] [--out FILE] [--only SECTION,...] [--minutes 10]

It needs torch, triton and numpy, and of this repository `kernels/`, `ops/gpu/`, `shared/` and the
cores of the executor and of the scheduler: nothing else is imported. `--dry` runs all that needs no
GPU, on tiny shapes in Triton's interpreter: its times mean nothing, its answers do. The exit status
is 1 if anything was wrong. docs/experiments.md says what is measured.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    # Not this folder, which Python puts first: it has no packages of ours.
    sys.path[0] = str(ROOT)
    from ops.gpu.check import main

    sys.exit(main(sys.argv[1:]))
