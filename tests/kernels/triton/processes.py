"""Processes in which Triton's interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_checks(
    check: str, *options: str, root: Path = ROOT, folder: str = "tests/kernels/triton"
) -> subprocess.CompletedProcess[str]:
    """pytest on one of the checks of a folder, as it lies in the tree at `root`.

    numpy warns where a GPU does not: of an infinity times zero, of a row that is all NaN.
    """
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore::RuntimeWarning"),
            *("-p", "no:cacheprovider", *options, f"{folder}/{check}"),
        ],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1", "CI": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
