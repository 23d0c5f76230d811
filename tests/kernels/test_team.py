"""The team of threads: all the work is done once, whoever is there to do it."""

import ctypes
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu import arguments as words
from kernels.cpu.backend import CpuKernels
from kernels.cpu.code import bodies
from kernels.cpu.threads import SPINS, the_team

ROOT = Path(__file__).parents[2]


def add_rows(rows: int, threads: int) -> bool:
    """Add ones to a matrix a row at a time; true if every row got exactly one."""
    residual = torch.zeros(rows, 32)
    ones, weight, normed = torch.ones(rows, 32), torch.ones(32), torch.empty(rows, 32)
    block = (ctypes.c_int64 * words.NORM_WORDS)()
    block[words.COUNT], block[words.RUN], block[words.SIZE] = rows, 1, 32
    block[words.RESIDUAL], block[words.DELTA] = residual.data_ptr(), ones.data_ptr()
    block[words.WEIGHT], block[words.NORMED] = weight.data_ptr(), normed.data_ptr()
    the_team().run(bodies("f32")["norm"], ctypes.addressof(block), threads)
    return bool((residual == 1).all())


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_row_once(threads: int) -> None:
    for rows in (0, 1, 2, 5, 100, 3000):
        for _ in range(20):
            assert add_rows(rows, threads)


def test_short_bodies_one_after_the_other() -> None:
    assert all(add_rows(7, 3) for _ in range(3000))


def test_sleepers_wake_up() -> None:
    for _ in range(20):
        time.sleep(SPINS * 1e-6)  # long enough for followers to have gone to sleep
        assert add_rows(500, 4)


def _in_child(answer: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    answer.send(add_rows(300, 4))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_works_alone() -> None:
    assert add_rows(300, 4)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_in_child, args=(there,))
    child.start()
    assert here.poll(30)
    assert here.recv()
    child.join(30)
    assert child.exitcode == 0


def test_a_process_ends_with_its_team() -> None:
    script = (
        "import torch; torch.set_num_threads(4)\n"
        "from kernels.cpu.backend import CpuKernels\n"
        "kernels = CpuKernels(torch.float32)\n"
        "print(kernels.silu_mul(torch.zeros(400, 400)).sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0\n", "")


def test_a_busy_neighbour_does_not_stop_the_team() -> None:
    """With more threads than cores someone always waits; the leader must not wait for them."""
    kernels = CpuKernels(torch.float32)
    gate_up = torch.randn(400, 400)
    before = torch.get_num_threads()
    expected = kernels.silu_mul(gate_up)
    try:
        torch.set_num_threads(16)
        for _ in range(200):
            assert torch.equal(kernels.silu_mul(gate_up), expected)
    finally:
        torch.set_num_threads(before)
