"""What the kernels need of a GPU, known without one: as the launcher would compile them."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.processes import ROOT

pytestmark = pytest.mark.triton

SHARED = {"80": 166_912, "90": 232_448, "100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that one program may take."""
MOST_SPILLED = 0 if version("triton").startswith("3.6.") else 32
"""Bytes a thread. Triton 3.9 takes 24 for sm_80's decode; the tiles were chosen with 3.6."""
MULTIPLIES = {  # the instruction of the tensor cores: decode's tile has 16 rows, prefill's 64
    ("80", "decode"): "HMMA.16816.F32.BF16",
    ("80", "prefill"): "HMMA.16816.F32.BF16",
    ("90", "decode"): "HMMA.16816.F32.BF16",
    ("90", "prefill"): "HGMMA",
    ("100", "decode"): "HMMA.16816.F32.BF16",
    ("100", "prefill"): "UTCHMMA",
    ("gfx942", "decode"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "prefill"): "v_mfma_f32_32x32x8_bf16",
}
WANTED = {
    "80": ("decode", "prefill", "decode e4m3", "write e4m3"),
    "90": ("decode", "prefill", "decode e4m3", "write", "write e4m3", "copy", "sample"),
    "100": ("decode", "prefill"),
    "gfx942": ("decode", "prefill", "decode e4m3", "sample"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from target to what its kernels compile to, once each."""
    reports: dict[str, dict[str, Any]] = {}

    def report_of(target: str) -> dict[str, Any]:
        if target not in reports:
            reports[target] = compile_for(target, tmp_path_factory.mktemp("triton"))
        return reports[target]

    return report_of


def compile_for(target: str, cache: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiled", target, *WANTED[target]],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps({name: {**kernel, "instructions": None} for name, kernel in report.items()}))
    return report


def count(kernel: dict[str, Any], start: str) -> int:
    return sum(n for name, n in kernel["instructions"].items() if name.startswith(start))


@pytest.mark.parametrize("target", WANTED)
def test_everything_fits_and_nothing_spills(target: str, compiled: Any) -> None:
    report = compiled(target)
    assert {name.split(":")[0] for name in report} == set(WANTED[target])
    for name, kernel in report.items():
        assert kernel["shared"] <= SHARED[target], name
        assert kernel["spilled"] <= MOST_SPILLED, name


@pytest.mark.parametrize(("target", "what"), MULTIPLIES)
def test_tensor_cores_multiply(target: str, what: str, compiled: Any) -> None:
    kernel = compiled(target)[f"{what}: attention_kernel"]
    assert count(kernel, MULTIPLIES[target, what]), kernel["instructions"]


@pytest.mark.parametrize("what", ["decode", "prefill"])
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_keys_and_values_are_fetched_ahead_16_bytes_at_a_time(
    target: str, what: str, compiled: Any
) -> None:
    kernel = compiled(target)[f"{what}: attention_kernel"]
    wide = count(kernel, "LDGSTS.E.BYPASS.128")
    assert wide
    assert count(kernel, "LDGSTS") == wide


def test_blocks_are_copied_and_written_16_bytes_at_a_time(compiled: Any) -> None:
    report = compiled("90")
    for name in ("copy: copy_kernel", "write: write_kernel", "write e4m3: write_kernel"):
        kernel = report[name]
        wide = count(kernel, "STG.E.128")
        assert wide, name
        assert count(kernel, "STG") == wide, name


def test_hardware_converts_e4m3_where_it_can(compiled: Any) -> None:
    assert count(compiled("90")["decode e4m3: attention_kernel"], "F2FP.F16.E4M3")
    assert not count(compiled("80")["decode e4m3: attention_kernel"], "F2FP.F16.E4M3")
