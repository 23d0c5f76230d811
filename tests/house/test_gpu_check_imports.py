"""The GPU check runs where there are torch, triton and numpy, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

from tests.house.bare import bare_site

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pathlib, sys
try:
    import structlog
except ModuleNotFoundError:
    pass
else:
    sys.exit("this Python is not bare")
for path in sorted(pathlib.Path("ops/gpu").glob("*.py")):
    importlib.import_module(f"ops.gpu.{path.stem}")
"""


def test_it_imports_nothing_else(tmp_path: Path) -> None:
    path = f"{bare_site(tmp_path)}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
