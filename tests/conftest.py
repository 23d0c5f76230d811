"""Rules for every test: in CI nothing is skipped that is not named, with its reason, in a file."""

import os
from pathlib import Path

import pytest

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
