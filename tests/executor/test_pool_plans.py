"""Where both pools of an executor lie, and how much of what is free there they get."""

import pytest

from services.executor.pool_plans import plan_pools
from shared.errors import StartError
from shared.settings import ExecutorSettings

GIB = 2**30
TOKEN_BYTES = 131_072  # Llama-3-8B, bfloat16


def planned(main_gib, gpu_gib=None, **settings):
    """GiB of the KV pool, and of the swap space."""
    gpu_bytes = None if gpu_gib is None else gpu_gib * GIB
    pool, swap = plan_pools(
        ExecutorSettings(**settings), TOKEN_BYTES, 8192, main_gib * GIB, gpu_bytes
    )
    return pool.pool_bytes / GIB, swap.space_bytes / GIB


def test_a_gpus_pool_takes_all_that_its_memory_has_for_it_whatever_main_memory_has():
    assert planned(16, 100)[0] == planned(1000, 100)[0] == 100
    assert planned(100)[0] == 4  # without one: a modest share


def test_a_gpus_pool_leaves_main_memory_to_the_swap_space():
    pool, swap = planned(16, 100, swap_space=16.0)
    assert (pool, swap) == (100, 16)
    pool, swap = planned(16, kv_cache_memory_bytes=6 * GIB, swap_space=10.0)
    assert (pool, swap) == (6, 10)
    with pytest.raises(StartError, match=r"--swap-space 11: 10\.00 GiB are free"):
        planned(16, kv_cache_memory_bytes=6 * GIB, swap_space=11.0)


def test_a_gpus_swap_space_is_pinned_and_so_comes_in_powers_of_two():
    assert planned(31, 100, swap_space=16.0)[1] == 16
    told = r"17: 31\.00 GiB are free .* \(16\.00 of them pinned.* lower it to 16\.00 or less$"
    with pytest.raises(StartError, match=told):
        planned(31, 100, swap_space=17.0)
    assert planned(31, kv_cache_memory_bytes=6 * GIB, swap_space=17.0)[1] == 17
    assert planned(0, 100)[1] == 0


def test_what_is_asked_for_is_held_against_the_gpus_memory():
    assert planned(1, 100, kv_cache_memory_bytes=50 * GIB)[0] == 50
    with pytest.raises(StartError, match=r"100\.00 GiB are free beside weights"):
        planned(1000, 100, kv_cache_memory_bytes=101 * GIB)
