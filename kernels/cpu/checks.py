"""What compiled code cannot check for itself, and would write anywhere for: a ValueError each."""

import torch
from torch import Tensor


def check_queries(pool: Tensor, queries: Tensor, dtype: torch.dtype) -> None:
    """Refuse queries [num_tokens, heads, head_dim] that do not belong to this pool or `dtype`.

    `pool` has its key-value heads in dimension 2. Raises: ValueError.
    """
    if queries.shape[1] % pool.shape[2]:
        raise ValueError(
            f"{pool.shape[2]} key-value heads do not divide {queries.shape[1]} query heads"
        )
    if queries.shape[2] % 8:
        raise ValueError(f"head size {queries.shape[2]} is not a multiple of 8")
    if queries.dtype != dtype:
        raise ValueError(f"queries are {queries.dtype}, this back end computes in {dtype}")


def check_copy(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Refuse pools whose blocks differ, and pairs [num_copies, 2] int64 beyond them.

    Raises: ValueError.
    """
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(
            f"a block of {source.dtype} {tuple(source.shape[1:])} is none of "
            f"{destination.dtype} {tuple(destination.shape[1:])}"
        )
    if not (source.is_contiguous() and destination.is_contiguous() and pairs.is_contiguous()):
        raise ValueError("pools and pairs must be contiguous")
    if pairs.dtype != torch.int64 or pairs.shape[1:] != (2,):
        raise ValueError(f"pairs are {pairs.dtype} {tuple(pairs.shape)}, not int64 [n, 2]")
    low, high = pairs.amin(0).tolist(), pairs.amax(0).tolist()
    for end, pool, first, last in zip(
        ("source", "destination"), (source, destination), low, high, strict=True
    ):
        if first < 0 or last >= len(pool):
            raise ValueError(f"{end} blocks {first}..{last} are not all in 0..{len(pool) - 1}")
