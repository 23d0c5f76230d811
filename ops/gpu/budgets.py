"""What the kernels may need of a GPU and must make use of, checked without one.

Compiled as the launcher would (compiled.py), each target in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from ops.gpu.section import Section

ROOT: Final = Path(__file__).resolve().parents[2]
SHARED: Final = {"80": 166_912, "90": 232_448, "100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that one program may take."""
MOST_SPILLED: Final = 0 if version("triton").startswith("3.6.") else 32
"""Bytes a thread. Triton 3.9 takes 24 for sm_80's decode; the tiles were chosen with 3.6."""
MULTIPLIES: Final = {  # tensor cores' instruction: decode's tile has 16 rows, prefill's 64
    ("80", "decode"): "HMMA.16816.F32.BF16",
    ("80", "prefill"): "HMMA.16816.F32.BF16",
    ("90", "decode"): "HMMA.16816.F32.BF16",
    ("90", "prefill"): "HGMMA",
    ("100", "decode"): "HMMA.16816.F32.BF16",
    ("100", "prefill"): "UTCHMMA",
    ("gfx942", "decode"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "prefill"): "v_mfma_f32_32x32x8_bf16",
}
_AHEAD: Final = "LDGSTS"
_WIDE_AHEAD: Final = "LDGSTS.E.BYPASS.128"

Report = dict[str, dict[str, Any]]
"""Of each "what: kernel" what compiled.py says of it."""


def compile_for(target: str, what: tuple[str, ...], cache: Path, timeout_s: float) -> Report:
    """Compile launches for a target. Raises: RuntimeError if that fails."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "ops.gpu.compiled", target, *what],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"compiling for {target}: {done.stderr[-2000:]}")
    report: Report = json.loads(done.stdout)
    return report


def count(kernel: dict[str, Any], start: str) -> int:
    """Instructions whose name begins so."""
    return sum(n for name, n in kernel["instructions"].items() if name.startswith(start))


def broken_budgets(target: str, report: Report) -> list[str]:
    """What is wrong with what came out of the compiler; nothing if all is well."""
    faults = []
    for name, kernel in report.items():
        if kernel["shared"] > SHARED[target]:
            faults.append(f"{name}: {kernel['shared']} bytes of shared memory")
        if kernel["spilled"] > MOST_SPILLED:
            faults.append(f"{name}: {kernel['spilled']} bytes a thread are spilled")
        what = name.split(":")[0]
        if not name.endswith(": attention_kernel") or (target, what) not in MULTIPLIES:
            continue
        if not count(kernel, MULTIPLIES[target, what]):
            faults.append(f"{name}: no {MULTIPLIES[target, what]}: tensor cores do not multiply")
        if not target.startswith("gfx"):
            wide = count(kernel, _WIDE_AHEAD)
            if not wide or count(kernel, _AHEAD) != wide:
                faults.append(f"{name}: keys and values are not all fetched ahead by 16 bytes")
    return faults


def run(section: Section) -> None:
    """Decode and prefill for each target."""
    with tempfile.TemporaryDirectory() as folder:
        for target in SHARED:
            what = f"sm_{target}" if target.isdigit() else target
            if not section.has_time(what):
                continue
            with section.guarded(what):
                timeout_s = max(60.0, section.deadline - time.monotonic())
                report = compile_for(target, ("decode", "prefill"), Path(folder), timeout_s)
                for fault in broken_budgets(target, report):
                    section.fault(what, fault)
                for name, kernel in report.items():
                    note = f"{kernel['spilled']} bytes spilled, {kernel['shared']} shared"
                    section.row(f"{what}, {name}", kernel["registers"], "registers", note)
