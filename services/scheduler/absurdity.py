"""What an executor says of itself is checked before it is believed: it sizes the block manager."""

import math
from typing import Final

from shared.messages import ExecutorReady

MOST_BLOCKS: Final = 2**24  # the free list holds each: more is a lie, and would fill our memory


def absurdity_of(ready: ExecutorReady) -> str:
    """What is wrong with an executor's figures; "" if nothing is."""
    limits = {
        "block_size": (1, 2**16),
        "num_gpu_blocks": (1, MOST_BLOCKS),
        "num_cpu_blocks": (0, MOST_BLOCKS),
        "max_model_len": (1, 2**31 - 1),
    }
    for name, (low, high) in limits.items():
        if not low <= getattr(ready, name) <= high:
            return f"{name} is {getattr(ready, name)}, not from {low} to {high}"
    costs = ready.costs
    if not (
        costs.block_bytes >= 0
        and 0 <= costs.copy_bytes_per_s < math.inf
        and 0 <= costs.prefill_tokens_per_s < math.inf
    ):
        return f"its costs are {costs}"
    if not 1 <= ready.shape.vocab_size < 2**31:
        return f"vocab_size is {ready.shape.vocab_size}"
    if any(not 0 <= token_id < ready.shape.vocab_size for token_id in ready.eos_token_ids):
        return f"eos_token_ids {ready.eos_token_ids} are not in the vocabulary"
    return ""
