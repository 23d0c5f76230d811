"""How the sequences of a request grow: what to ask of a step, and when an answer ends one."""

from typing import Protocol

from services.scheduler.core.sequence import Sequence
from shared import messages
from shared.ids import Ids, SequenceId
from shared.messages import PREVIOUS
from shared.sampling import SamplingParams, num_beam_top


class Decoding(Protocol):
    """The growth of one request."""

    def asks(self, sequence: Sequence) -> tuple[messages.Sample, ...]:
        """What to draw from the last logits of a sequence."""

    def stops(self, num_generated: int, token_id: int) -> bool:
        """Whether `token_id`, as the `num_generated`-th generated token, ends its sequence."""


def decoding_of(params: SamplingParams, eos_token_ids: Ids, vocab_size: int) -> Decoding:
    """The way these parameters ask for."""
    if params.max_tokens == 0:
        return Nothing()
    stop_ids = stop_ids_of(params, eos_token_ids)
    return (
        Beam(params, stop_ids, vocab_size) if params.use_beam_search else Sample(params, stop_ids)
    )


def stop_ids_of(params: SamplingParams, eos_token_ids: Ids) -> frozenset[int]:
    """The tokens that end a sequence."""
    return frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))


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

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        self._params = params
        self._needs_history = params.draw.needs_history
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
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


class Beam:
    """Beams draw nothing: each asks for the likeliest tokens, and beams.py does the rest."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
        self.stop_ids = stop_ids
        self.num_top = min(num_beam_top(params, len(stop_ids)), vocab_size)

    def asks(self, sequence: Sequence) -> tuple[messages.Sample, ...]:
        """The likeliest tokens, of the raw distribution: those that would stop too early as well.

        So many are asked for that, whatever stops, enough are left.
        """
        ask = messages.Sample(sequence.sequence_id, 0, 0, None, num_top=self.num_top)
        return (ask,)

    def stops(self, num_generated: int, token_id: int) -> bool:
        """Never: the search says which texts are over."""
        return False
