"""Each `check_*.py` beside this file in a process of its own, under Triton's interpreter."""

from pathlib import Path

import pytest

from tests.kernels.triton.processes import run_checks

pytestmark = pytest.mark.triton

CHECKS = sorted(path.name for path in Path(__file__).parent.glob("check_*.py"))


@pytest.mark.parametrize("check", CHECKS)
def test_under_the_interpreter(check: str) -> None:
    report = run_checks(check, folder="tests/executor/gpu")
    assert report.returncode == 0, report.stdout + report.stderr
