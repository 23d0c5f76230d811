import pytest

from services.executor.sizing import (
    DEFAULT_CAP_BYTES,
    PoolWishes,
    available_bytes,
    logits_bytes,
    plan_pool,
)
from shared.errors import StartError
from shared.geometry import ModelShape

GIB = 2**30
SMOLLM2 = ModelShape(30, 9, 3, 64, 576, 49_152, 8_192).bytes_per_token(2)
QWEN3_0_6B = ModelShape(28, 16, 8, 128, 1_024, 151_936, 40_960).bytes_per_token(2)


def test_it_says_what_the_pool_holds():
    wishes = PoolWishes(block_size=16, max_model_len=2048, num_blocks=2131)
    plan = plan_pool(wishes, SMOLLM2, 8192, available_bytes=4 * GIB)
    assert str(plan) == "pool: 2,131 blocks of 16 tokens = 34,096 tokens, 16.6 requests of 2,048"


def test_a_length_that_does_not_fit_is_refused_with_all_the_numbers():  # R19, vllm#29233
    wishes = PoolWishes(block_size=128, max_model_len=40_960, memory_bytes=4 * GIB)
    with pytest.raises(StartError) as refused:
        plan_pool(wishes, QWEN3_0_6B, 40_960, available_bytes=64 * GIB)
    message = str(refused.value)
    assert "needs 4.38 GiB" in message
    assert "has 4.00 GiB" in message
    assert "longest that fits is 37376" in message
    assert "--max-model-len" in message
    assert "--kv-cache-memory-bytes" in message
    assert "--num-gpu-blocks-override" in message


def test_the_length_it_names_does_fit():
    wishes = PoolWishes(block_size=128, max_model_len=37_376, memory_bytes=4 * GIB)
    assert plan_pool(wishes, QWEN3_0_6B, 40_960, 64 * GIB).max_model_len == 37_376


def test_a_length_nobody_asked_for_is_lowered_instead():
    plan = plan_pool(PoolWishes(128, memory_bytes=4 * GIB), QWEN3_0_6B, 40_960, 64 * GIB)
    assert (plan.max_model_len, plan.lowered_from) == (37_376, 40_960)
    plan = plan_pool(PoolWishes(128, memory_bytes=5 * GIB), QWEN3_0_6B, 40_960, 64 * GIB)
    assert (plan.max_model_len, plan.lowered_from) == (40_960, None)


def test_bytes_are_cut_into_whole_blocks():
    block_bytes = 16 * SMOLLM2
    plan = plan_pool(PoolWishes(16, memory_bytes=10 * block_bytes - 1), SMOLLM2, 8192, GIB)
    assert (plan.num_blocks, plan.pool_bytes, plan.max_model_len) == (9, 9 * block_bytes, 144)


@pytest.mark.parametrize(
    ("available", "bytes_per_token", "longest", "expected"),
    [
        (1 * GIB, SMOLLM2, 8192, 0.4 * GIB),  # 40 % of what is free
        (100 * GIB, SMOLLM2, 8192, DEFAULT_CAP_BYTES),  # no more than 4 GiB
        (100 * GIB, QWEN3_0_6B, 40_960, 40_960 * QWEN3_0_6B),  # unless one request needs it
        (100 * GIB, 8, 8192, 256 * 8192 * 8),  # what 256 requests can use
    ],
)
def test_by_default_it_takes_a_modest_share(available, bytes_per_token, longest, expected):
    plan = plan_pool(PoolWishes(16), bytes_per_token, longest, available)
    assert 0 <= expected - plan.pool_bytes < plan.block_bytes


@pytest.mark.parametrize(
    ("wishes", "flag"),
    [
        (PoolWishes(16, num_blocks=3_000), "--num-gpu-blocks-override 3000"),
        (PoolWishes(16, memory_bytes=2 * GIB), f"--kv-cache-memory-bytes {2 * GIB}"),
    ],
)
def test_a_pool_larger_than_what_is_free_is_refused(wishes, flag):
    with pytest.raises(StartError, match=flag) as refused:
        plan_pool(wishes, SMOLLM2, 8192, available_bytes=GIB)
    assert "1.00 GiB are free" in str(refused.value)
    assert f"{GIB // (16 * SMOLLM2) * (16 * SMOLLM2 if wishes.memory_bytes else 1)} or less" in str(
        refused.value
    )


def test_a_pool_of_no_block_is_refused():
    with pytest.raises(StartError, match="one block of 16 tokens needs"):
        plan_pool(PoolWishes(16, memory_bytes=1000), SMOLLM2, 8192, GIB)


def test_a_length_the_model_was_not_made_for_is_refused():
    with pytest.raises(StartError, match="--max-model-len 9000: the model was made for 8192"):
        plan_pool(PoolWishes(16, max_model_len=9000), SMOLLM2, 8192, GIB)


# --------------------------------------------------------------------------- what is free


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB free; returns a function that writes more files into it."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: 16777216 kB\nMemAvailable: {8 * 2**20} kB\n")
    write("proc/self/cgroup", "")
    return write


def free_gib(tmp_path):
    return available_bytes(tmp_path / "proc", tmp_path / "cgroup") / GIB


def test_without_groups_it_is_the_machines(machine, tmp_path):
    assert free_gib(tmp_path) == 8
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_gib(tmp_path) == 8


def group_2(write, path, limit, used, cache):
    write(f"cgroup/{path}/memory.max", f"{limit}\n")
    write(f"cgroup/{path}/memory.current", f"{used}\n")
    write(f"cgroup/{path}/memory.stat", f"anon 5\ninactive_file {cache}\n")


def test_a_group_of_version_2_limits_and_its_cache_counts_as_free(machine, tmp_path):
    machine("proc/self/cgroup", "0::/shop/server\n")
    group_2(machine, "shop/server", 4 * GIB, 3 * GIB, GIB)
    assert free_gib(tmp_path) == 2
    group_2(machine, "shop", GIB, 0, 0)  # the group above has less
    assert free_gib(tmp_path) == 1
    group_2(machine, "shop", "max", 0, 0)
    assert free_gib(tmp_path) == 2


def test_a_group_of_version_1_limits_too(machine, tmp_path):
    machine("proc/self/cgroup", "5:cpu:/\n4:cpuset,memory:/docker/abc\n0::/\n")
    # In a container the group's own files lie at the root of the mount.
    machine("cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine("cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    machine("cgroup/memory/memory.stat", f"total_inactive_file {GIB}\n")
    assert free_gib(tmp_path) == 3


def test_a_group_over_its_limit_has_nothing_left(machine, tmp_path):
    machine("proc/self/cgroup", "0::/\n")
    group_2(machine, ".", GIB, 2 * GIB, 0)
    assert free_gib(tmp_path) == 0


def test_this_very_machine_has_something_free():
    assert available_bytes() > 0


def test_the_logits_of_a_step_are_a_row_a_request_and_a_row_a_scored_token():
    assert logits_bytes(49_152) == (256 + 256) * 49_152 * 4
