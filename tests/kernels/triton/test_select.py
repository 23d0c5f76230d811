"""Who gets the Triton kernels, and that nobody else needs Triton."""

import subprocess
import sys

import pytest
import torch

from kernels.select import select_kernels, select_kv_dtype
from shared.errors import StartError
from tests.kernels.triton.processes import ROOT

pytestmark = pytest.mark.triton

CUDA = torch.device("cuda")


class OneGpu:
    """What torch says of an L4."""

    major, minor, shared_memory_per_block_optin = 8, 9, 101_376


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: OneGpu)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_gets_them() -> None:
    kernels = select_kernels(CUDA, torch.float16)
    assert kernels.name == "triton"
    assert select_kv_dtype(kernels, "auto") == torch.float16
    assert select_kv_dtype(kernels, "fp8_e4m3") == torch.float8_e4m3fn
    for name in ("int8", "bf16"):
        with pytest.raises(StartError, match=rf"{name}: this device .* auto or fp8_e4m3 "):
            select_kv_dtype(kernels, name)
    assert select_kv_dtype(select_kernels(CUDA, torch.float32), "bf16") == torch.bfloat16


@pytest.mark.usefixtures("gpu")
def test_dtypes_it_does_not_compute_in() -> None:
    with pytest.raises(StartError, match=r"--dtype float64: a GPU computes in bfloat16"):
        select_kernels(CUDA, torch.float64)


@pytest.mark.usefixtures("gpu")
def test_without_triton_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kernels.triton_gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(StartError, match=r"need triton.*splitflap\[gpu\]"):
        select_kernels(CUDA, torch.float16)


def test_a_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from kernels.select import select_kernels;"
        "select_kernels(torch.device('cpu'), torch.float32); assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
