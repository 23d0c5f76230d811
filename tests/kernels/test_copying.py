"""Block copies of the CPU back end: every size and alignment, on one thread and on several."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.backend import PIECE_BYTES
from kernels.interface import Kernels
from tests.kernels.backends import BACKENDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["native", "numba"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return BACKENDS[request.param](torch.float32)


def random_bytes(num_blocks: int, block_bytes: int, offset: int, seed: int) -> torch.Tensor:
    """[num_blocks, block_bytes] that begins `offset` bytes after a cache line."""
    memory = torch.empty(num_blocks * block_bytes + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + offset
    pool = memory[first : first + num_blocks * block_bytes].view(num_blocks, block_bytes)
    return pool.random_(256, generator=torch.Generator().manual_seed(seed))


SIZES = [1, 16, 63, 64, 200, 384, 23_040, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES - 24]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("offsets", [(0, 0), (8, 0), (0, 8), (3, 5)])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_every_byte_arrives_and_no_other_changes(
    kernels: Kernels, block_bytes: int, offsets: tuple[int, int], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = random_bytes(40, block_bytes, offsets[0], 1)
        destination = random_bytes(50, block_bytes, offsets[1], 2)
        pairs = torch.stack((torch.randperm(40)[:30], torch.randperm(50)[:30]), dim=1)
        expected = destination.clone()
        expected[pairs[:, 1]] = source[pairs[:, 0]]
        kernels.copy_blocks(source, destination, pairs)
        assert torch.equal(destination, expected)
    finally:
        torch.set_num_threads(before)


def test_no_pairs_copy_nothing(kernels: Kernels) -> None:
    pool = random_bytes(2, 64, 0, 1)
    before = pool.clone()
    kernels.copy_blocks(pool, pool, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([[4, 0]], "source blocks 4..4 are not all in 0..3"),
        ([[0, 1], [1, 6]], "destination blocks 1..6 are not all in 0..5"),
        ([[-1, 0]], "source blocks -1..-1"),
        ([[0, 1, 2]], "not int64 \\[n, 2\\]"),
        ([[0.0, 1.0]], "not int64 \\[n, 2\\]"),
    ],
)
def test_what_would_write_anywhere_is_refused(
    kernels: Kernels, pairs: list[list[float]], why: str
) -> None:
    source, destination = random_bytes(4, 64, 0, 1), random_bytes(6, 64, 0, 2)
    before = destination.clone()
    with pytest.raises(ValueError, match=why):
        kernels.copy_blocks(source, destination, torch.tensor(pairs))
    assert torch.equal(destination, before)


def test_pools_that_differ_are_refused(kernels: Kernels) -> None:
    pairs = torch.tensor([[0, 0]])
    pool = random_bytes(4, 64, 0, 1)
    with pytest.raises(ValueError, match=r"a block of torch.uint8 \(64,\) is none of"):
        kernels.copy_blocks(pool, random_bytes(4, 32, 0, 1), pairs)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.copy_blocks(pool[::2], pool, pairs)


def test_code_from_the_cache_finds_what_it_calls() -> None:
    """Without numba, which tells LLVM where libc's functions are; odd bytes are libc's to copy."""
    program = (
        "import sys, torch\n"
        "from kernels.cpu.backend import CpuKernels\n"
        "from kernels.cpu.code import bodies\n"
        "bodies('team')\n"
        "assert sys.argv[1] == 'fill' or 'numba' not in sys.modules\n"
        "pool = torch.arange(9, dtype=torch.uint8).view(3, 3).contiguous()\n"
        "CpuKernels(torch.float32).copy_blocks(pool, pool, torch.tensor([[0, 2]]))\n"
        "assert pool[2].tolist() == [0, 1, 2]\n"
    )
    for turn in ("fill", "use"):
        subprocess.run([sys.executable, "-c", program, turn], check=True, cwd=ROOT)
