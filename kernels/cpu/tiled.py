"""Weights in tiles of 16 outputs, multiplied by our own machine code (`product.py`).

A tile is `[steps][16]` float32, or `[steps][16][2]` bfloat16 (two inputs' weights side by side, as
the dot product takes them). A row of the matrix can still be picked out, so one copy serves as
embedding and as head. Every result is the same, bit by bit, whatever the number of rows.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from kernels.cpu import arguments as words
from kernels.cpu.code import bodies, kind_of
from kernels.cpu.memory import Arena
from kernels.cpu.threads import num_threads, the_team

EMBED_RUN: Final = 16
"""Tokens a thread embeds at a time; fewer are done before another thread would wake up."""

_arena: Final = Arena()


def fits_tiles(weight: Tensor) -> bool:
    """True if whole tiles hold it: outputs a multiple of 16, inputs of the pair of bfloat16."""
    outputs, inputs = weight.shape
    return outputs % words.WIDTH == 0 and inputs % _inputs_at_once(weight.dtype) == 0


class _Tiles:
    """One matrix in tiles, and the argument block of its products."""

    def __init__(self, weight: Tensor, bias: Tensor | None, body: str) -> None:
        self._dtype = weight.dtype
        self._outputs, inputs = weight.shape
        self._inputs = inputs
        together = _inputs_at_once(weight.dtype)
        count, steps = self._outputs // words.WIDTH, inputs // together
        self._tiles = _arena.empty((count, steps, words.WIDTH, together), weight.dtype)
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
        self._embed = bodies(kind_of(weight.dtype))["embed"]
        self._embed_block = (ctypes.c_int64 * words.EMBED_WORDS)()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size] float32."""
        count = len(token_ids)
        embedded = torch.empty((count, self._inputs))
        if count == 0:
            return embedded
        lowest, highest = token_ids.aminmax()
        if lowest < 0 or highest >= self._outputs:
            raise ValueError(f"token id {int(highest)} is outside the vocabulary")
        token_ids = token_ids.contiguous()
        block = self._embed_block
        block[words.NEXT] = 0
        block[words.COUNT] = count
        block[words.RUN] = EMBED_RUN
        block[words.E_IDS] = token_ids.data_ptr()
        block[words.E_TILES] = self._tiles.data_ptr()
        block[words.E_STEPS] = self._tiles.shape[1]
        block[words.E_OUT] = embedded.data_ptr()
        threads = num_threads() if count > EMBED_RUN else 1
        self._team.run(self._embed, ctypes.addressof(block), threads)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return self._multiply(hidden, torch.float32)


def _inputs_at_once(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
