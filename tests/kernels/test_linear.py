"""Every form of a linear layer against float64, and rows that do not feel their batch mates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.features import has_tiles
from kernels.cpu.linear import OneDnnLinear, onednn_packs, pack_linear, pack_vocabulary
from kernels.cpu.tiled import TiledLinear, TiledVocabulary
from kernels.interface import Linear
from kernels.reference import PlainLinear, PlainVocabulary
from tests.kernels.backends import NATIVE

CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
FORMS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "tiles": TiledLinear,
    "oneDNN": OneDnnLinear,
    "plain": PlainLinear,
    "chosen": pack_linear,
}
FORMS |= {
    name: (lambda weight, bias, make=make: make(weight.dtype).pack_linear(weight, bias))
    for name, make in NATIVE.items()
}
WHOLE_TILES = ((960, 576), (64, 64), (48, 2), (576, 1536))
ODD = ((100, 40), (172, 63), (344, 64), (7, 5))


def is_here(form: str, dtype: torch.dtype) -> bool:
    return {"tiles": has_tiles, "oneDNN": onednn_packs}.get(form, lambda dtype: True)(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_form_multiplies(form: str, has_bias: bool, dtype: torch.dtype) -> None:
    if not is_here(form, dtype):
        return  # this CPU never uses it
    for features in WHOLE_TILES if form == "tiles" else WHOLE_TILES + ODD:
        weight = (torch.randn(features) / features[1] ** 0.5).to(dtype)
        bias = torch.randn(features[0]).to(dtype) if has_bias else None
        linear = FORMS[form](weight.clone(), bias)
        for rows in (0, 1, 2, 3, 11, 12, 13, 33, 130):
            x = torch.randn(rows, features[1]).to(dtype)
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            got = linear(x)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), exact, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_vocabulary_gives_rows_and_logits(dtype: torch.dtype) -> None:
    weight = torch.randn(112, 64).to(dtype)
    token_ids = torch.tensor([0, 111, 17, 17, 64])
    hidden = torch.randn(5, 64).to(dtype)
    made = [PlainVocabulary(weight), pack_vocabulary(weight.clone())]
    made += [make(dtype).pack_vocabulary(weight.clone()) for make in NATIVE.values()]
    if has_tiles(dtype):
        made.append(TiledVocabulary(weight.clone()))
    for vocabulary in made:
        assert torch.equal(vocabulary.embed(token_ids), weight[token_ids].float())
        many = torch.arange(112).repeat(3)
        assert torch.equal(vocabulary.embed(many), weight[many].float())
        assert vocabulary.embed(token_ids[:0]).shape == (0, 64)
        for outside in (-1, 112):
            with pytest.raises((ValueError, IndexError)):
                vocabulary.embed(torch.tensor([3, outside]))
        logits = vocabulary.logits(hidden)
        assert logits.dtype == torch.float32
        tolerance = 0.1 if isinstance(vocabulary, PlainVocabulary) else 1e-4
        torch.testing.assert_close(
            logits.double(), hidden.double() @ weight.double().T, atol=tolerance, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("form", ["tiles", *NATIVE])
def test_a_row_in_tiles_is_the_same_in_any_batch(form: str, dtype: torch.dtype) -> None:
    if not is_here(form, dtype):
        return
    linear = FORMS[form](torch.randn(80, 96).to(dtype), torch.randn(80).to(dtype))
    x = torch.randn(40, 96).to(dtype)
    together = linear(x)
    for rows in (1, 2, 5, 7, 12, 13, 25):
        assert torch.equal(linear(x[:rows]), together[:rows])
