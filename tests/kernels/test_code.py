"""Machine code: cached where it can be, compiled where it must be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import code

ROOT = Path(__file__).parents[2]
PROBE = (
    "import sys, time, torch, llvmlite.binding\n"
    "from kernels.cpu import code\n"
    "started = time.monotonic()\n"
    "code.bodies('team')\n"
    "print(time.monotonic() - started, 'numba' in sys.modules)\n"
)


def test_what_is_packed_comes_out_again() -> None:
    objects = {"one": ("symbol", b"\n\x00code"), "two": ("other", b"")}
    assert code._unpack(code._pack(objects)) == objects


@pytest.mark.parametrize("damage", [b"", b"something else", code._MAGIC + bytes(40)])
def test_a_damaged_cache_is_not_trusted(damage: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        code._unpack(damage)
    whole = code._pack({"one": ("symbol", b"code")})
    with pytest.raises(ValueError, match="damaged"):
        code._unpack(whole[:-1])


def run_probe(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | environment, check=True,
    )  # fmt: skip


def test_a_start_from_the_cache_needs_no_compiler() -> None:
    code.bodies("team")
    took, compiled = run_probe(PROBE).stdout.split()
    assert compiled == "False"
    assert float(took) < 1.0


def test_without_any_writable_cache_it_compiles_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache folder would be")
    script = (
        "import pathlib\n"
        "from kernels.cpu import code\n"
        f"code._folders = lambda: iter([pathlib.Path({str(blocked)!r}) / 'cache'])\n"
        "assert set(code.bodies('team')) == {'lead', 'follow', 'nothing', 'copy'}\n"
    )
    told = run_probe(script)
    assert "compiling_kernels" in told.stdout + told.stderr
    assert "kernel_cache_not_writable" in told.stdout + told.stderr


def test_the_second_start_finds_what_the_first_left(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from kernels.cpu import code\n"
        f"code._folders = lambda: iter([pathlib.Path({str(tmp_path)!r})])\n"
        "code.bodies('team')\n"
        "print('numba' in sys.modules)\n"
    )
    assert run_probe(script).stdout.split()[-1] == "True"
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o444 == 0o444
    tmp_path.chmod(0o555)
    assert run_probe(script).stdout.split() == ["False"]
    tmp_path.chmod(0o755)
    file.write_bytes(file.read_bytes()[:-10])
    told = run_probe(script)
    assert "kernel_cache_unreadable" in told.stdout + told.stderr
    assert told.stdout.split()[-1] == "True"
