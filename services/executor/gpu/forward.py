"""One forward pass on the device, of a step that lies there."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.triton_gpu.step import StepLayout, Sums
from services.executor.model.llama import Llama


def forward(
    model: Llama,
    pool: Tensor,
    layout: StepLayout,
    there: Mapping[str, Tensor],
    drawn: Tensor,
    sums: Sums,
) -> Tensor:
    """Put in what PREVIOUS stands for, and compute. Nothing here waits for the device.

    Args:
        model, pool, layout: that belong together.
        there: the step's arrays, as `StepLayout.lay_out` names them, and "sources" [num_tokens]
            int64: which of the tokens drawn in the plan before each is; -1: none, it is known.
        drawn: [n] int32, the tokens drawn in the plan before; -1 where none could be.
        sums: room for the step's unfinished sums.
    Returns: [num_logits, vocab_size] float32.
    """
    sources = there["sources"]
    asked = drawn[sources.clamp(min=0)].clamp(min=0)  # a row that goes on from nothing is told so
    token_ids = torch.where(sources >= 0, asked, there["token_ids"])
    return model.forward(pool, layout.batch({**there, "token_ids": token_ids}, sums))
