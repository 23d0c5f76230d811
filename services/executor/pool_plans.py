"""Both pools of an executor, planned: where each of them lies, and what is free there."""

from services.executor.sizing import PoolPlan, PoolWishes, plan_pool
from services.executor.swap_space import SwapPlan, SwapWishes, plan_swap_space
from shared.settings import ExecutorSettings


def plan_pools(
    settings: ExecutorSettings,
    bytes_per_token: int,
    longest_len: int,
    main_bytes: int,
    gpu_bytes: int | None = None,
) -> tuple[PoolPlan, SwapPlan]:
    """Size the KV pool and the swap space.

    Args:
        settings: what the user asked for.
        bytes_per_token: keys and values of one token over all layers.
        longest_len: the longest sequence the model is made for.
        main_bytes: of main memory, free beside weights and logits.
        gpu_bytes: of a GPU's memory, which has the KV pool then; None: main memory has both.
    Raises: StartError if they do not fit as asked.
    """
    is_gpu = gpu_bytes is not None
    wishes = PoolWishes(
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_gpu_blocks_override,
        memory_bytes=settings.kv_cache_memory_bytes,
        takes_all=is_gpu,
    )
    pool_bytes = main_bytes if gpu_bytes is None else gpu_bytes
    plan = plan_pool(wishes, bytes_per_token, longest_len, pool_bytes)
    swap_wishes = SwapWishes(
        space_gib=settings.swap_space,
        is_default="swap_space" not in settings.model_fields_set,
        num_blocks=settings.num_cpu_blocks_override,
    )
    left = main_bytes if is_gpu else main_bytes - plan.pool_bytes
    return plan, plan_swap_space(swap_wishes, plan, left, is_pinned=is_gpu)
