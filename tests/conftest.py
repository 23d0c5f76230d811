"""Rules for every test.

In CI nothing is skipped that is not named, with its reason, in a file. A loaded machine fails no
property: how long an example takes is nobody's property, pytest's timeout aside.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the rest as hypothesis has it, here or in CI
settings.load_profile("house")

_MAY_SKIP = Path(__file__).with_name("may_skip.txt")
_skipped: list[str] = []


def _may_skip() -> set[str]:
    """Node ids; `tests/x.py::test_y  # reason` a line."""
    lines = _MAY_SKIP.read_text(encoding="utf-8").splitlines()
    return {line.split("#")[0].strip() for line in lines} - {""}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    unnamed = sorted(set(_skipped) - _may_skip())
    if os.environ.get("CI") == "true" and unnamed:
        print(f"\nskipped in CI without being named in {_MAY_SKIP.name}: {', '.join(unnamed)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
