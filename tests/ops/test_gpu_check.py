"""The GPU check without a GPU: all of it on tiny shapes, and that it tells what is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.gpu.check import DRY_SHARES
from tests.house.bare import bare_site

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ONLY_ON_A_GPU = "there are CUDA graphs only on a GPU"


def run_check(
    tmp_path: Path, *options: str, root: Path = ROOT
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The check where there is nothing but torch, triton and numpy; and the JSON it wrote."""
    out, site = tmp_path / "check.json", tmp_path / "site"
    site.mkdir()
    done = subprocess.run(
        [sys.executable, "ops/gpu_check.py", "--out", str(out), *options],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(bare_site(site)), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=1100,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    return done, json.loads(out.read_text())


def tree(tmp_path: Path) -> Path:
    """A copy of all that the check needs, to plant faults in."""
    root = tmp_path / "tree"
    for name in ("kernels", "shared", "services", "ops/gpu"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "ops" / "gpu_check.py", root / "ops")
    return root


def plant(root: Path, file: str, right: str, wrong: str) -> None:
    path = root / file
    source = path.read_text()
    assert source.count(right) == 1, "the fault no longer fits"
    path.write_text(source.replace(right, wrong))


def faulty(section: dict[str, Any]) -> set[str]:
    return {fault["what"].split(":")[0] for fault in section["fault"]}


def test_everything_that_needs_no_gpu(tmp_path: Path) -> None:
    done, check = run_check(tmp_path, "--dry", "--minutes", "15")
    assert done.returncode == 0, done.stdout + done.stderr
    assert check["is_right"]
    assert check["is_dry"]
    assert list(check["sections"]) == list(DRY_SHARES)
    for name, section in check["sections"].items():
        assert section["row"], name
        assert {entry["why"] for entry in section["left_out"]} <= {ONLY_ON_A_GPU}, name
        assert not section["target"], name
    rows = {row["what"]: row for row in check["sections"]["correctness"]["row"]}
    assert rows["a decoder's loop, by graphs"]["value"] == 48
    assert "blocks out" in rows["a decoder's loop, eager"]["note"]
    assert "sm_90, prefill: attention_kernel" in done.stdout
    assert "all right" in done.stdout


def test_faults_are_told_each_where_it_is(tmp_path: Path) -> None:
    root, device = tree(tmp_path), "kernels/triton_gpu/device"
    plant(root, f"{device}/attention.py", "peak + tl.log2(mass)", "peak + tl.log(mass)")
    plant(root, f"{device}/blocks.py", "(slot % BLOCK_SIZE)", "((slot + 1) % BLOCK_SIZE)")
    plant(
        root, f"{device}/sampling.py",
        "high, low, _, _ = tl.philox", "low, high, _, _ = tl.philox",
    )  # fmt: skip
    options = ("--dry", "--only", "correctness", "--minutes", "10")
    done, check = run_check(tmp_path, *options, root=root)
    assert done.returncode == 1
    assert not check["is_right"]
    section = check["sections"]["correctness"]
    assert {"attention", "writes", "draws", "a decoder's loop, eager"} <= faulty(section)
    assert "copies and swaps" not in faulty(section)
    assert {row["what"] for row in section["row"]} >= {"copies and swaps"}
    assert "WRONG draws: token" in done.stdout


def test_a_section_that_dies_or_hangs_takes_no_other_with_it(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "ops/gpu/ceilings.py").write_text(
        "import os, signal\n\nCOPY = FROM_DEVICE = TO_DEVICE = PRODUCT = ''\n\n\n"
        "def run(section):\n"
        "    section.row('before', 1, '')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (root / "ops/gpu/loop.py").write_text(
        "import time\n\n\ndef run(section):\n    time.sleep(999)\n"
    )
    options = ("--dry", "--only", "ceilings,swaps,loop", "--minutes", "0.6")
    done, check = run_check(tmp_path, *options, root=root)
    assert done.returncode == 1
    dead, alive, hanging = check["sections"].values()
    assert [row["what"] for row in dead["row"]] == ["before"]
    assert "exit status -9" in dead["fault"][0]["why"]
    assert not alive["fault"]
    assert alive["row"] or alive["left_out"]
    assert "killed after" in hanging["fault"][0]["why"]


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done, check = run_check(tmp_path, "--only", "ceilings")
    assert done.returncode == 1
    assert "sees no GPU; --dry needs none" in check["sections"]["ceilings"]["fault"][0]["why"]


def test_no_such_section(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "ops/gpu_check.py", "--only", "speed"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--only speed: no such section; there are ceilings, correctness" in done.stderr
