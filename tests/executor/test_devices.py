"""What --device means, and what is refused where there is no GPU."""

import pytest
import torch

from services.executor.devices import Place, place_of
from shared.errors import StartError
from shared.settings import ExecutorSettings


def place(*, is_toy=False, **settings):
    return place_of(ExecutorSettings(**settings), is_toy=is_toy)


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, Place.GPU), (False, Place.CPU)])
def test_auto_is_a_gpu_if_torch_sees_one(monkeypatch, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert place() is expected
    assert place(is_toy=True) is Place.CPU
    assert place(device="cpu") is Place.CPU
    assert place(device="cuda") is Place.GPU  # its kernels say that there is none


def test_the_toy_is_the_cpus():
    with pytest.raises(StartError, match="--device cuda: the toy computes on the CPU"):
        place(device="cuda", is_toy=True)


@pytest.mark.parametrize("device", ["cpu", "interpreter"])
def test_a_share_of_a_gpu_is_refused_without_one(device):
    with pytest.raises(StartError, match=r"--gpu-memory-utilization 0\.5: no GPU is used here"):
        place(device=device, gpu_memory_utilization=0.5)
    assert place(device="cuda", gpu_memory_utilization=0.5) is Place.GPU


def test_the_interpreter_computes_in_float32():
    assert place(device="interpreter", dtype="float32") is Place.INTERPRETER
    with pytest.raises(StartError, match="--dtype float16: --device interpreter computes in"):
        place(device="interpreter", dtype="float16")
    with pytest.raises(StartError, match="--kv-cache-dtype fp8_e4m3: --device interpreter"):
        place(device="interpreter", kv_cache_dtype="fp8_e4m3")


def test_the_interpreter_has_no_int8_weights():
    with pytest.raises(StartError, match="--quantization int8: --device interpreter runs a GPU's"):
        place(device="interpreter", quantization="int8")
