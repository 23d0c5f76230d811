"""Weights in tiles of 16 outputs, multiplied by our own machine code (`product.py`).

A tile is `[steps][16]` float32, or `[steps][16][2]` bfloat16 (two inputs' weights side by side, as
the dot product takes them). A row of the matrix can still be picked out, so one copy serves as
embedding and as head. Every result is the same, bit by bit, whatever the number of rows.
"""

import ctypes

import torch
from torch import Tensor

from kernels.cpu import arguments as words
from kernels.cpu.code import bodies, kind_of
from kernels.cpu.memory import advise_huge_pages
from kernels.cpu.threads import num_threads, the_team


def fits_tiles(weight: Tensor) -> bool:
    """True if whole tiles hold it: outputs a multiple of 16, inputs of the pair of bfloat16."""
    outputs, inputs = weight.shape
    return outputs % words.WIDTH == 0 and inputs % _inputs_at_once(weight.dtype) == 0


class _Tiles:
    """One matrix in tiles, and the argument block of its products."""

    def __init__(self, weight: Tensor, bias: Tensor | None, body: str) -> None:
        self._dtype = weight.dtype
        self._outputs, inputs = weight.shape
        together = _inputs_at_once(weight.dtype)
        count, steps = self._outputs // words.WIDTH, inputs // together
        self._tiles = torch.empty((count, steps, words.WIDTH, together), dtype=weight.dtype)
        advise_huge_pages(self._tiles)
        self._tiles.copy_(weight.view(count, words.WIDTH, steps, together).transpose(1, 2))
        self._bias = torch.zeros(self._outputs) if bias is None else bias.float()
        self._team = the_team()
        self._body = bodies(kind_of(weight.dtype))[body]
        block = self._block = (ctypes.c_int64 * words.PRODUCT_WORDS)()
        block[words.COUNT] = count
        block[words.P_TILES] = self._tiles.data_ptr()
        block[words.P_STEPS] = steps
        block[words.P_INPUT_STRIDE] = inputs * weight.itemsize
        block[words.P_BIAS] = self._bias.data_ptr()

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        y = torch.empty((x.shape[0], self._outputs), dtype=dtype)
        block = self._block
        block[words.NEXT] = 0
        block[words.P_INPUT] = x.data_ptr()
        block[words.P_OUTPUT] = y.data_ptr()
        block[words.P_OUTPUT_STRIDE] = self._outputs * dtype.itemsize
        block[words.P_ROWS] = x.shape[0]
        self._team.run(self._body, ctypes.addressof(block), num_threads())
        return y


class TiledLinear(_Tiles):
    """A linear layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias, "products")

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return self._multiply(x, self._dtype)


class TiledVocabulary(_Tiles):
    """Embeddings and head. Logits are not rounded to bfloat16: near ties stay apart."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None, "logits")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size] float32."""
        tile, place = token_ids // words.WIDTH, token_ids % words.WIDTH
        return self._tiles[tile, :, place].flatten(1).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return self._multiply(hidden, torch.float32)


def _inputs_at_once(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
