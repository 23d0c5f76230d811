"""The field `usage.kv_bill`: what the requests of one answer cost in blocks of the KV pool."""

import math
from collections.abc import Sequence
from typing import Any

from shared.messages import KVBill


def bill_fields(bills: Sequence[KVBill]) -> dict[str, Any]:
    """The bill of an answer to several prompts, each a request that ran by itself.

    The peaks are those of the request with the highest: they need not have come at one time.
    `sharing_saved` is the mean, by the blocks that each request would have held at its peak without
    sharing. All else is summed.
    """
    weights = [bill.peak_blocks + bill.peak_saved_blocks for bill in bills]
    saved = math.fsum(
        weight * min(1.0, max(0.0, bill.sharing_saved))  # of NaN, which is no JSON, 0
        for weight, bill in zip(weights, bills, strict=True)
    )
    return {
        "peak_blocks": max(bill.peak_blocks for bill in bills),
        "peak_saved_blocks": max(bill.peak_saved_blocks for bill in bills),
        "sharing_saved": round(saved / max(1, sum(weights)), 6),
        "copied_blocks": sum(bill.copied_blocks for bill in bills),
        "preemptions_swap": sum(bill.preemptions_swap for bill in bills),
        "preemptions_recompute": sum(bill.preemptions_recompute for bill in bills),
        "swapped_bytes": sum(bill.swapped_bytes for bill in bills),
    }
