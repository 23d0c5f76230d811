"""How large the KV pool is, and how long a sequence may get: the memory plan.

The pool has, in this order of precedence,
  - the blocks of --num-gpu-blocks-override,
  - the bytes of --kv-cache-memory-bytes,
  - a modest share of what is free once the weights are loaded: 40 %, but no more than 256 requests
    of the longest length can use, and no more than 4 GiB unless a single request needs it.
Its pages are not touched before blocks are used, so an idle server is small. What the logits of the
largest step take (100 MB for 49,152 token ids) is set aside beforehand. On a GPU the pool has all
that --gpu-memory-utilization leaves (gpu/memory.py) instead of the modest share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import StartError
from shared.geometry import blocks_in
from shared.messages import MAX_SCORED_TOKENS

FREE_SHARE: Final = 0.4
DEFAULT_CAP_BYTES: Final = 4 * 2**30  # as vLLM's CPU back end: VLLM_CPU_KVCACHE_SPACE
DEFAULT_CAP_REQUESTS: Final = 256  # as vLLM's max_num_seqs, and our scheduler's

_FLOAT32_BYTES: Final = 4

_MORE_MEMORY: Final = "--kv-cache-memory-bytes or --num-gpu-blocks-override"


@dataclass(frozen=True, slots=True)
class PoolWishes:
    """What the user asked for; None = not said.

    `takes_all`: a pool of which nothing is said takes all that is available: a GPU's.
    """

    block_size: int
    max_model_len: int | None = None
    num_blocks: int | None = None
    memory_bytes: int | None = None
    takes_all: bool = False


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool to be made.

    `lowered_from` is the model's longest length where the pool is too small for it and nobody
    asked for a length.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    lowered_from: int | None = None

    @property
    def num_tokens(self) -> int:
        """Token places in the pool."""
        return self.num_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"pool: {self.num_blocks:,} blocks of {self.block_size} tokens = "
            f"{self.num_tokens:,} tokens, {self.num_tokens / self.max_model_len:.1f} requests of "
            f"{self.max_model_len:,}"
        )


def logits_bytes(vocab_size: int) -> int:
    """What the logits of one step take where 256 sequences draw, and as many tokens are scored.

    256 is the scheduler's default; a larger --max-num-seqs takes more in steps that large.
    """
    return (DEFAULT_CAP_REQUESTS + MAX_SCORED_TOKENS) * vocab_size * _FLOAT32_BYTES


def plan_pool(
    wishes: PoolWishes, bytes_per_token: int, longest_len: int, available_bytes: int
) -> PoolPlan:
    """Size the pool.

    Args:
        wishes: the flags.
        bytes_per_token: keys and values of one token over all layers.
        longest_len: the longest sequence the model is made for.
        available_bytes: what is free, the weights already loaded and the logits set aside.
    Raises: StartError with what is needed, what is there, and which flag to change.
    """
    asked = wishes.max_model_len or longest_len
    if asked > longest_len:
        raise StartError(
            f"--max-model-len {asked}: the model was made for {longest_len} tokens; lower it"
        )
    block_bytes = wishes.block_size * bytes_per_token
    request_bytes = blocks_in(asked, wishes.block_size) * block_bytes
    budget_bytes = _budget_bytes(wishes, block_bytes, request_bytes, available_bytes)
    num_blocks = budget_bytes // block_bytes
    fits = num_blocks * wishes.block_size
    if not num_blocks:
        raise StartError(
            f"one block of {wishes.block_size} tokens needs {_gib(block_bytes)}; there are "
            f"{_gib(budget_bytes)} for the KV pool: give it more with {_MORE_MEMORY}, or lower "
            "--block-size"
        )
    if asked <= fits:
        return PoolPlan(num_blocks, wishes.block_size, block_bytes, asked)
    if wishes.max_model_len is None:
        return PoolPlan(num_blocks, wishes.block_size, block_bytes, fits, lowered_from=asked)
    raise StartError(
        f"--max-model-len {asked}: one request of this length needs {_gib(request_bytes)} of KV "
        f"cache, and the pool has {_gib(budget_bytes)}; the longest that fits is {fits}: lower "
        f"--max-model-len to it, or give the pool more with {_MORE_MEMORY}"
    )


def _budget_bytes(
    wishes: PoolWishes, block_bytes: int, request_bytes: int, available_bytes: int
) -> int:
    if wishes.num_blocks is not None:
        budget_bytes, flag = wishes.num_blocks * block_bytes, "--num-gpu-blocks-override"
        value = wishes.num_blocks
    elif wishes.memory_bytes is not None:
        budget_bytes, flag = wishes.memory_bytes, "--kv-cache-memory-bytes"
        value = wishes.memory_bytes
    elif wishes.takes_all:
        return available_bytes
    else:
        cap = max(DEFAULT_CAP_BYTES, request_bytes)
        return min(int(FREE_SHARE * available_bytes), cap, DEFAULT_CAP_REQUESTS * request_bytes)
    if budget_bytes > available_bytes:
        raise StartError(
            f"{flag} {value}: the pool would need {_gib(budget_bytes)}, and "
            f"{_gib(available_bytes)} are free beside weights and logits; lower it to "
            f"{available_bytes // block_bytes * (1 if wishes.num_blocks else block_bytes)} or less"
        )
    return budget_bytes


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


# --------------------------------------------------------------------------- what is free


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still take: the machine's, or its control groups' if that is less.

    Args:
        proc: where procfs is.
        cgroups: where control groups (version 1 or 2) are mounted.
    """
    return min([_machine_bytes(proc), *_group_bytes(proc, cgroups)])


def _machine_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise StartError(f"{proc}/meminfo has no MemAvailable; size the pool with {_MORE_MEMORY}")


def _group_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limited group that we are in has left; its reclaimable cache counts as free."""
    try:
        memberships = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            left = _left_in(group, *names)
            if left is not None:
                yield left
            if group == root:
                break


def _left_in(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes left in one group; None if it has no limit, or is not visible from here."""
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((group / usage_name).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(counts.get(cache_name, 0)))
