import pytest

from services.executor.sizing import PoolPlan
from services.executor.swap_space import SwapWishes, plan_swap_space
from shared.errors import StartError

GIB = 2**30
BLOCK_BYTES = 368_640  # SmolLM2-135M, bfloat16, 16 tokens


def pool(max_model_len=8192, block_bytes=BLOCK_BYTES):
    return PoolPlan(1000, 16, block_bytes, max_model_len)


def test_it_says_what_the_space_holds():
    plan = plan_swap_space(SwapWishes(1.0), pool(), 8 * GIB)
    assert str(plan) == "swap space: 2,912 blocks = 46,592 tokens, 1.00 GiB"
    assert plan.why_lowered is None
    assert GIB - BLOCK_BYTES < plan.space_bytes <= GIB


def test_blocks_win_over_space():
    assert plan_swap_space(SwapWishes(1.0, num_blocks=3), pool(), GIB).num_blocks == 3
    assert plan_swap_space(SwapWishes(1.0, num_blocks=0), pool(), GIB).num_blocks == 0


@pytest.mark.parametrize("is_default", [False, True])
def test_no_space_is_no_blocks(is_default):
    plan = plan_swap_space(SwapWishes(0.0, is_default), pool(), 0)
    assert (plan.num_blocks, plan.why_lowered) == (0, None)
    assert str(plan) == "swap space: 0 blocks = 0 tokens, 0.00 GiB"


def test_space_that_was_asked_for_and_is_not_there_is_refused_with_what_would_fit():
    with pytest.raises(StartError) as refused:
        plan_swap_space(SwapWishes(4.0), pool(), 3 * GIB)
    message = str(refused.value)
    assert message.startswith("--swap-space 4: 3.00 GiB are free")
    assert "lower it to 3.00 or less" in message
    assert "--kv-cache-memory-bytes" in message
    assert plan_swap_space(SwapWishes(3.0), pool(), 3 * GIB).why_lowered is None


def test_blocks_that_do_not_fit_are_refused_with_how_many_would():
    with pytest.raises(StartError, match="--num-cpu-blocks-override 3000") as refused:
        plan_swap_space(SwapWishes(1.0, num_blocks=3000), pool(), GIB)
    most = GIB // BLOCK_BYTES
    assert f"lower it to {most} or less" in str(refused.value)
    assert plan_swap_space(SwapWishes(1.0, num_blocks=most), pool(), GIB).num_blocks == most


def test_the_default_is_lowered_where_memory_is_short():
    plan = plan_swap_space(SwapWishes(1.0, is_default=True), pool(), GIB)
    assert 0.39 * GIB < plan.space_bytes <= 0.4 * GIB
    assert "1.00 GiB are free" in plan.why_lowered
    assert plan_swap_space(SwapWishes(1.0, is_default=True), pool(), 0).num_blocks == 0


def test_more_than_all_requests_use_is_made_only_if_asked_for():  # the toy: 8 bytes a token
    toy = pool(64, block_bytes=128)
    plan = plan_swap_space(SwapWishes(1.0, is_default=True), toy, 8 * GIB)
    assert plan.num_blocks == 256 * 4
    assert plan.why_lowered == "256 requests of 64 tokens use no more"
    asked = plan_swap_space(SwapWishes(1.0), toy, 8 * GIB)
    assert (asked.space_bytes, asked.why_lowered) == (GIB, None)
