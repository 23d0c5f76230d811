"""`native/check.cpp`: step and draws in C++ alone, under sanitizers that Python would not stand."""

import subprocess
from pathlib import Path

from kernels.cpu.native.build import compiler

CHECK = Path(__file__).parent / "native" / "check.cpp"


def test_no_step_reads_or_writes_where_it_should_not(tmp_path: Path) -> None:
    program = tmp_path / "check"
    subprocess.run(
        [*compiler(), "-std=c++17", "-O1", "-march=native", "-pthread", "-Wno-psabi",
         "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-o", program, CHECK],
        check=True, timeout=400,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, timeout=180, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count(" equal\n") == 25
    assert done.stdout.count(" as sorted\n") == 12
