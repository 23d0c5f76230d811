"""Bugs, put into a copy of the kernels one at a time: each is caught by the check it names."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernels.triton.processes import ROOT, run_checks

pytestmark = pytest.mark.triton

TREES = ("kernels", "shared", "services", "ops/gpu", "tests/kernels")
FILES = ("pyproject.toml", "tests/conftest.py", "tests/may_skip.txt")
FAILED = 1  # pytest's exit code; below 0 the process was killed


@dataclass(frozen=True)
class Mutant:
    """`right` becomes `wrong` in a file of kernels/triton_gpu; `tests` is for pytest's -k."""

    file: str
    right: str
    wrong: str
    check: str
    tests: str


MUTANTS = {
    "a query does not see itself": Mutant(
        "device/attention.py", "places[None, :] <= positions", "places[None, :] < positions",
        "check_attention.py", "head_sizes",
    ),
    "a window one too wide": Mutant(
        "device/attention.py", "> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW",
        "check_window.py", "test_windows",
    ),
    "another head of the group": Mutant(
        "device/attention.py", "GROUP + rows % GROUP", "GROUP + rows // GROUP",
        "check_attention.py", "test_heads",
    ),
    "old sums keep the old scale": Mutant(
        "device/attention.py", "acc = acc * decay[:, None]", "acc = acc * 1.0",
        "check_attention.py", "split_and_folded",
    ),
    "another logarithm in the fold": Mutant(
        "device/attention.py", "peak + tl.log2(mass)", "peak + tl.log(mass)",
        "check_attention.py", "split_and_folded",
    ),
    "reads behind the last key": Mutant(
        "device/attention.py", "tl.load(places, mask=is_key[:, None], other=0.0) if MASKED",
        "tl.load(places) if MASKED", "check_attention.py", "head_sizes",
    ),
    "a mask too few": Mutant(
        "work.py", "(first + 1) // tile_keys * tile_keys", "keys_to // tile_keys * tile_keys",
        "check_attention.py", "wide_tiles",
    ),
    "splits that depend on the batch": Mutant(
        "work.py", "    counts = np.diff(starts)\n",
        "    counts = np.diff(starts)\n"
        "    globals().update(SPLIT_TOKENS=256 if len(counts) > 1 else 512)\n",
        "check_invariance.py", "batch_mates",
    ),
    "half the soft cap": Mutant(
        "device/attention.py", "2.0 * scale / soft_cap", "1.0 * scale / soft_cap",
        "check_scores.py", "soft_cap",
    ),
    "slopes the other way": Mutant(
        "device/attention.py", "places[None, :] - positions[:, None]\n",
        "positions[:, None] - places[None, :]\n", "check_scores.py", "alibi",
    ),
    "values without their scale": Mutant(
        "device/attention.py", "(value_scale / mass)", "(1.0 / mass)",
        "check_e4m3.py", "scaled_keys",
    ),
    "ties rounded up": Mutant(
        "device/e4m3.py", " + ((bits >> 20) & 1)", " + 1", "check_e4m3.py", "nearest",
    ),
    "places in 32 bits": Mutant(
        "device/attention.py", "blocks.to(tl.int64) * stride_block", "blocks * stride_block",
        "check_offsets.py", "far_into",
    ),
    "the next slot": Mutant(
        "device/blocks.py", "(slot % BLOCK_SIZE)", "((slot + 1) % BLOCK_SIZE)",
        "check_blocks.py", "where_the_slots_say",
    ),
    "copies of the first layer": Mutant(
        "device/blocks.py", " + layer * stride_from_layer", "",
        "check_blocks.py", "copy_on_write",
    ),
    "all of the k-th": Mutant(
        "device/sampling.py", "(keys == cut_key) & (ids <= cut_id)", "(keys == cut_key)",
        "check_sampling.py", "weights_are_exact",
    ),
    "min-p leaves out the likeliest": Mutant(
        "device/sampling.py", "measures = _measure(weights, weights >= min_p",
        "measures = _measure(weights, weights > min_p",
        "check_sampling.py", "weights_are_exact",
    ),
    "other dice": Mutant(
        "device/sampling.py", "high, low, _, _ = tl.philox", "low, high, _, _ = tl.philox",
        "check_sampling.py", "dice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_bug_is_caught(bug: str, tmp_path: Path) -> None:
    mutant = MUTANTS[bug]
    for name in TREES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    file = tmp_path / "kernels" / "triton_gpu" / mutant.file
    source = file.read_text()
    assert source.count(mutant.right) == 1, "the mutant no longer fits the kernel"
    file.write_text(source.replace(mutant.right, mutant.wrong))
    report = run_checks(mutant.check, "-x", "-k", mutant.tests, root=tmp_path)
    assert report.returncode == FAILED or report.returncode < 0, report.stdout + report.stderr
