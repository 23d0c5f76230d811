"""What one request costs in blocks of the KV pool; kept only with `--enable-kv-bill`."""

from dataclasses import dataclass

from services.scheduler.core.sequence import Sequence
from shared.messages import KVBill, PreemptionMode


@dataclass(slots=True)
class Bill:
    """Counts as it goes; a step is a plan in which the request has a row.

    Attributes:
        used: different blocks that it held, summed over its steps.
        without: blocks that it would have held without sharing among its sequences, likewise.
    """

    peak_blocks: int = 0
    peak_saved_blocks: int = 0
    used: int = 0
    without: int = 0
    copied_blocks: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swapped_bytes: int = 0

    def step(self, live: tuple[Sequence, ...]) -> None:
        """The tables of its live sequences are as a plan that computes some of it leaves them."""
        tables = [one.table.block_ids for one in live if one.table is not None]
        without = sum(map(len, tables))
        used = without if len(tables) == 1 else len(set().union(*tables))
        self.used += used
        self.without += without
        self.peak_blocks = max(self.peak_blocks, used)
        self.peak_saved_blocks = max(self.peak_saved_blocks, without - used)

    def gave_way(self, mode: PreemptionMode) -> None:
        """All its blocks were taken away."""
        if mode is PreemptionMode.SWAP:
            self.preemptions_swap += 1
        else:
            self.preemptions_recompute += 1

    def told(self) -> KVBill:
        """All of it so far."""
        return KVBill(
            self.peak_blocks,
            self.peak_saved_blocks,
            sharing_saved=(self.without - self.used) / self.without if self.without else 0.0,
            copied_blocks=self.copied_blocks,
            preemptions_swap=self.preemptions_swap,
            preemptions_recompute=self.preemptions_recompute,
            swapped_bytes=self.swapped_bytes,
        )
