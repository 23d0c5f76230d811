"""The native team of threads: all the work is done once, whoever is there to do it."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu.native.backend import NativeKernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def product() -> Iterator["Product"]:
    """A product that many can take part in; gives torch its threads back."""
    before = torch.get_num_threads()
    yield Product()
    torch.set_num_threads(before)


class Product:
    """A linear layer and what it gives for its input on one thread."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self._x = torch.randn(5, 64, generator=random)
        weight = torch.randn(640, 64, generator=random)
        self._linear = NativeKernels(torch.float32).pack_linear(weight, None)
        torch.set_num_threads(1)
        self._expected = self._linear(self._x)

    def is_right_on(self, threads: int) -> bool:
        """True if so many threads give the same."""
        torch.set_num_threads(threads)
        return torch.equal(self._linear(self._x), self._expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_output_once(product: Product, threads: int) -> None:
    assert all(product.is_right_on(threads) for _ in range(200))


def test_short_phases_one_after_the_other(product: Product) -> None:
    assert all(product.is_right_on(3) for _ in range(5000))


def test_sleepers_wake_up(product: Product) -> None:
    for _ in range(30):
        time.sleep(0.002)  # long enough for followers to have gone to sleep
        assert product.is_right_on(4)


def test_more_threads_than_cores(product: Product) -> None:
    assert all(product.is_right_on(16) for _ in range(300))


def test_teams_of_changing_size(product: Product) -> None:
    assert all(product.is_right_on(1 + number % 7) for number in range(300))


def _in_child(answer: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    answer.send(Product().is_right_on(4))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_works_alone(product: Product) -> None:
    assert product.is_right_on(4)
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
        "from kernels.cpu.native.backend import NativeKernels\n"
        "linear = NativeKernels(torch.float32).pack_linear(torch.zeros(640, 64), None)\n"
        "print(linear(torch.zeros(9, 64)).sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0\n", "")
