"""How the sequences of a request grow: what to ask of a step, and when an answer ends one.

`Sample(n)` and `Beam(width)` belong here too; a request holds one `Decoding` and asks no further.
"""

from dataclasses import replace
from typing import Protocol

from shared import messages
from shared.ids import Ids, SequenceId
from shared.sampling import SamplingParams


class Decoding(Protocol):
    """The growth of one request."""

    def asks(
        self, sequence_id: SequenceId, index: int, num_generated: int
    ) -> tuple[messages.Sample, ...]:
        """What to draw from the last logits of a sequence that has `num_generated` tokens."""

    def stops(self, num_generated: int, token_id: int) -> bool:
        """Whether `token_id`, as the `num_generated`-th generated token, ends its sequence."""


class Sample:
    """One sequence, one draw a step."""

    def __init__(self, params: SamplingParams, eos_token_ids: Ids) -> None:
        self._min_tokens = params.min_tokens
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(eos_token_ids)
        self._stop_ids = frozenset(stop_ids)
        self._ask = messages.Sample(SequenceId(0), 0, params.seed, params.draw)
        self._banned = tuple(sorted(stop_ids))
        self._free_asks: dict[SequenceId, tuple[messages.Sample, ...]] = {}

    def asks(
        self, sequence_id: SequenceId, index: int, num_generated: int
    ) -> tuple[messages.Sample, ...]:
        """One draw. Before `min_tokens` no token that would end the sequence may be drawn."""
        if num_generated < self._min_tokens:
            banned = self._banned
            return (replace(self._ask, sequence_id=sequence_id, index=index, banned_ids=banned),)
        if sequence_id not in self._free_asks:  # the same at every step from here on
            ask = replace(self._ask, sequence_id=sequence_id, index=index)
            self._free_asks[sequence_id] = (ask,)
        return self._free_asks[sequence_id]

    def stops(self, num_generated: int, token_id: int) -> bool:
        """True for eos (unless ignored) and the stop ids, after `min_tokens` others."""
        return token_id in self._stop_ids and num_generated > self._min_tokens
