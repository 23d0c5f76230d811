"""--quantization int8: products are those of whole numbers, exactly, on any CPU."""

import pytest
import torch
from torch import Tensor

from kernels.interface import Linear
from kernels.reference import ReferenceKernels
from kernels.select import select_kernels
from shared.errors import StartError
from tests.executor.model.teacher import all_logits
from tests.executor.model.tiny import random_prompts
from tests.kernels.backends import NATIVE
from tests.kernels.decoders import Sizes, random_decoder

DTYPES = (torch.float32, torch.bfloat16)
GROUP = 64
"""Inputs that share a scale."""

SHAPES = ((960, 576), (64, 64), (48, 2), (100, 40), (172, 63), (344, 65), (7, 5), (5, 7))


def linear(weight: Tensor, bias: Tensor | None = None, backend: str = "native") -> Linear:
    """The layer in int8; inputs are of the dtype of `weight`."""
    return NATIVE[backend](weight.dtype, quantization="int8").pack_linear(weight, bias)


def as_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers (float64), and their scales (float32)."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scales).round().double(), scales


def by_whole_numbers(x: Tensor, weight: Tensor) -> Tensor:
    """The product before it is rounded to a dtype: to the last bit if it is of one group."""
    outputs, output_scales = as_int8(weight)
    total = torch.zeros(len(x), len(weight))
    for inputs, part in zip(x.split(GROUP, 1), outputs.split(GROUP, 1), strict=True):
        rows, row_scales = as_int8(inputs)
        total += (rows @ part.T).float() * row_scales
    return total * output_scales.T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_products_are_those_of_whole_numbers(backend: str, dtype: torch.dtype) -> None:
    for features in SHAPES:
        weight = torch.randn(features).to(dtype)
        multiply = linear(weight, None, backend)
        for rows in (0, 1, 2, 3, 11, 12, 13, 33, 130):
            x = (5 * torch.randn(rows, features[1])).to(dtype)
            got, wanted = multiply(x), by_whole_numbers(x, weight)
            if features[1] <= GROUP:
                assert torch.equal(got, wanted.to(dtype))
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(got.float(), wanted, atol=2e-4, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_is_the_same_in_any_batch(backend: str, dtype: torch.dtype) -> None:
    multiply = linear(torch.randn(80, 600).to(dtype), torch.randn(80).to(dtype), backend)
    x = torch.randn(40, 600).to(dtype)
    together = multiply(x)
    for rows in (1, 2, 5, 7, 12, 13, 25):
        assert torch.equal(multiply(x[:rows]), together[:rows])


def test_every_cpu_has_the_same_bits() -> None:
    weight, x = torch.randn(172, 600), torch.randn(30, 600)
    first, *others = [linear(weight, None, backend)(x) for backend in NATIVE]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("backend", NATIVE)
def test_a_bias_is_added_unrounded(backend: str) -> None:
    weight, bias, x = torch.randn(172, 63), torch.randn(172), torch.randn(9, 63)
    wanted = by_whole_numbers(x, weight) + bias
    torch.testing.assert_close(linear(weight, bias, backend)(x), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
def test_the_largest_sums_that_there_can_be(backend: str) -> None:
    weight = torch.stack((torch.full((GROUP,), 127.0), torch.full((GROUP,), -127.0)))
    got = linear(weight, None, backend)(weight)
    most = 127.0 * 127 * GROUP
    assert torch.equal(got, torch.tensor([[most, -most], [-most, most]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_nothing_of_hardly_anything_and_of_nan(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 60).to(dtype)
    rows = torch.randn(6, 60).to(dtype)
    rows[1] = 0
    rows[2] = 1e-30
    rows[3, 59], rows[4, 0] = float("nan"), float("-inf")
    got = linear(weight)(rows)
    wanted = by_whole_numbers(rows, weight).to(dtype)
    assert torch.equal(got[[0, 2, 5]], wanted[[0, 2, 5]])
    assert not got[1].any()
    assert got[3:5].isnan().all()


def test_weights_of_nothing_and_of_nan_stay_in_their_output() -> None:
    weight, x = torch.randn(40, 60), torch.randn(3, 60)
    weight[7] = 0
    weight[9, 3] = float("nan")
    got, wanted = linear(weight)(x), by_whole_numbers(x, weight)
    others = [output for output in range(40) if output not in (7, 9)]
    assert torch.equal(got[:, others], wanted[:, others])
    assert not got[:, 7].any()
    assert got[:, 9].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_vocabulary_gives_rows_and_logits(backend: str, dtype: torch.dtype) -> None:
    weight, hidden = torch.randn(113, 63).to(dtype), torch.randn(5, 63).to(dtype)
    vocabulary = NATIVE[backend](dtype, quantization="int8").pack_vocabulary(weight.clone())
    whole, scales = as_int8(weight)
    ids = torch.tensor([0, 112, 17, 17, 64])
    assert torch.equal(vocabulary.embed(ids), (whole.float() * scales)[ids])
    assert torch.equal(vocabulary.logits(hidden), by_whole_numbers(hidden, weight))


@pytest.mark.parametrize("form", [Sizes(), Sizes(has_bias=True, tied=False), Sizes(inner=90)])
def test_a_step_is_near_the_exact_one_and_the_same_on_any_cpu(form: Sizes) -> None:
    prompts = random_prompts(form.vocab, 1, 40, 90)
    exact = torch.cat(all_logits(random_decoder(ReferenceKernels(torch.float32), form), prompts))
    models = {
        name: random_decoder(make(torch.float32, quantization="int8"), form)
        for name, make in NATIVE.items()
    }
    assert all(model.is_one_step == (form.inner == 96) for model in models.values())
    for model in models.values():
        got = torch.cat(all_logits(model, prompts))
        assert 1e-3 < (got - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_has_no_int8_weights(device: str) -> None:
    with pytest.raises(StartError, match=r"--quantization int8: a GPU's kernels.*leave it out"):
        select_kernels(torch.device(device), torch.bfloat16, "int8")


def test_without_a_compiler_there_are_no_int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu.native import library
    from kernels.cpu.native.build import NotBuilt

    def nothing() -> None:
        raise NotBuilt("no C++ compiler: g++ is not there")

    monkeypatch.setattr(library, "native", nothing)
    with pytest.raises(StartError, match=r"--quantization int8: .*g\+\+ is not there.*warm_up"):
        select_kernels(torch.device("cpu"), torch.float32, "int8")
    assert select_kernels(torch.device("cpu"), torch.float32).name != "native"
