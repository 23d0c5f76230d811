"""Norm, activation, rotary positions, cache writes and copies: CPU against reference."""

import pytest
import torch

from kernels.reference import KEYS, VALUES, ReferenceKernels
from tests.kernels.backends import BACKENDS
from tests.kernels.batches import Case, draw, filled_pool

DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 64), (2, 172), (5, 7), (70, 576)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_add_and_norm(rows: int, width: int, dtype: torch.dtype, backend: str) -> None:
    residual = torch.randn(rows, width)
    delta = torch.randn(rows, width).to(dtype)
    weight = torch.rand(width) + 0.5
    ours, theirs = residual.clone(), residual.clone()
    got = BACKENDS[backend](dtype).add_rms_norm(ours, delta, weight, 1e-5)
    expected = ReferenceKernels(dtype).add_rms_norm(theirs, delta, weight, 1e-5)
    assert got.dtype == dtype
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    untouched = BACKENDS[backend](dtype).add_rms_norm(ours, None, weight, 1e-5)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(untouched, got, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "half"), [(1, 1536), (2, 172), (4, 5), (50, 1536)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_activation(rows: int, half: int, dtype: torch.dtype, backend: str) -> None:
    gate_up = (torch.randn(rows, 2 * half) * 20).to(dtype)
    gate_up[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    got = BACKENDS[backend](dtype).silu_mul(gate_up)
    torch.testing.assert_close(got, ReferenceKernels(dtype).silu_mul(gate_up), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_passes_through_the_small_steps(dtype: torch.dtype, backend: str) -> None:
    kernels = BACKENDS[backend](dtype)
    broken = torch.full((1, 32), float("nan"))
    assert kernels.silu_mul(broken.to(dtype)).isnan().all()
    assert kernels.add_rms_norm(broken, None, torch.ones(32), 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rotate_and_write(head_dim: int, block_size: int, dtype: torch.dtype, backend: str) -> None:
    drawn = draw(Case(((20, 20), (37, 1), (50, 11)), block_size, head_dim=head_dim), dtype)
    num_tokens = len(drawn.queries)
    qkv = torch.randn(num_tokens, (9 + 6) * head_dim).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), 1)
    written, returned = [], []
    for kernels in (BACKENDS[backend](dtype), ReferenceKernels(dtype)):
        pool = filled_pool(kernels, drawn, 1, is_poisoned=False)
        returned.append(kernels.rotate_and_write(pool, 1, qkv, rotary, drawn.batch))
        written.append(pool)
    torch.testing.assert_close(returned[0], returned[1], **CLOSE[dtype])
    together = 2 if backend != "numba" and dtype == torch.bfloat16 else 1
    ours = as_reference(written[0], head_dim, together)
    torch.testing.assert_close(ours, written[1], **CLOSE[dtype])


def as_reference(pool: torch.Tensor, head_dim: int, together: int) -> torch.Tensor:
    """A CPU pool in the reference's layout; `together` numbers of a key or a value lie in pairs."""
    keys, values = pool[:, :, :, KEYS], pool[:, :, :, VALUES]
    block_size = pool.shape[4] // head_dim
    keys = keys.unflatten(3, (head_dim // together, block_size, together))
    keys = keys.transpose(3, 4).flatten(4)
    if block_size % together == 0:
        values = values.unflatten(3, (block_size // together, head_dim, together))
        values = values.transpose(4, 5).flatten(3, 4)
    else:
        values = values.unflatten(3, (block_size, head_dim))
    return torch.stack((keys, values), dim=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_copied_blocks_hold_what_their_sources_held(backend: str) -> None:
    for kernels in (BACKENDS[backend](torch.float32), ReferenceKernels(torch.float32)):
        drawn = draw(Case(((200, 1),)), torch.float32)
        gpu = filled_pool(kernels, drawn, 1, is_poisoned=False)
        cpu = torch.zeros_like(gpu)
        before = gpu.clone()
        kernels.copy_blocks(gpu, cpu, torch.tensor([[3, 0], [1, 5]]))
        kernels.copy_blocks(gpu, gpu, torch.tensor([[2, 4]]))
        assert torch.equal(cpu[0], before[3])
        assert torch.equal(cpu[5], before[1])
        assert not cpu[[1, 2, 3, 4]].any()
        assert torch.equal(gpu[4], before[2])
        assert torch.equal(gpu[2], before[2])
