"""How the sequences of a request grow: what to ask of a step, and when an answer ends one.

`Beam(width)` belongs here too; a request holds one `Decoding` and asks no further.
"""

from typing import Protocol

from services.scheduler.core.sequence import Sequence
from shared import messages
from shared.ids import Ids, SequenceId
from shared.messages import PREVIOUS
from shared.sampling import SamplingParams


class Decoding(Protocol):
    """The growth of one request."""

    def asks(self, sequence: Sequence) -> tuple[messages.Sample, ...]:
        """What to draw from the last logits of a sequence."""

    def stops(self, num_generated: int, token_id: int) -> bool:
        """Whether `token_id`, as the `num_generated`-th generated token, ends its sequence."""


def decoding_of(params: SamplingParams, eos_token_ids: Ids) -> Decoding:
    """The way these parameters ask for."""
    return Nothing() if params.max_tokens == 0 else Sample(params, eos_token_ids)


class Nothing:
    """No draw at all: the prompt is computed for its scores alone."""

    def asks(self, sequence: Sequence) -> tuple[messages.Sample, ...]:
        """None."""
        return ()

    def stops(self, num_generated: int, token_id: int) -> bool:
        """Never: nothing grows."""
        return False


class Sample:
    """Each of n sequences grows by one draw a step; the first is drawn n times from one prompt."""

    def __init__(self, params: SamplingParams, eos_token_ids: Ids) -> None:
        self._params = params
        self._needs_history = params.draw.needs_history
        self._min_tokens = params.min_tokens
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(eos_token_ids)
        self._stop_ids = frozenset(stop_ids)
        self._banned = tuple(sorted(stop_ids))
        self._free_asks: dict[SequenceId, tuple[messages.Sample, ...]] = {}

    def asks(self, sequence: Sequence) -> tuple[messages.Sample, ...]:
        """One draw. Before `min_tokens` no token that would end the sequence may be drawn."""
        if self._min_tokens and sequence.num_drawn < self._min_tokens:
            return (self._ask(sequence, self._banned),)
        asks = self._free_asks.get(sequence.sequence_id)
        if asks is None:
            asks = (self._ask(sequence, ()),)
            if not self._needs_history:  # the same at every step from here on
                self._free_asks[sequence.sequence_id] = asks
        return asks

    def _ask(self, sequence: Sequence, banned_ids: Ids) -> messages.Sample:
        """Only a draw that needs the tokens before it carries them."""
        has_history = self._needs_history
        return messages.Sample(
            sequence.sequence_id,
            sequence.index,
            self._params.seed,
            self._params.draw,
            history=(
                sequence.prompt + tuple(sequence.generated) + (PREVIOUS,) * sequence.ahead
                if has_history
                else ()
            ),
            num_prompt=len(sequence.prompt) if has_history else 0,
            banned_ids=banned_ids,
            num_top=self._params.logprobs,
        )

    def stops(self, num_generated: int, token_id: int) -> bool:
        """True for eos (unless ignored) and the stop ids, after `min_tokens` others."""
        return token_id in self._stop_ids and num_generated > self._params.min_tokens
