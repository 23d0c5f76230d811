"""One choice of an answer: what has come of it, and what of that its client has been told."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from services.gateway import failures
from services.gateway.answer_stream import Piece
from services.gateway.answers import Ending
from services.gateway.choice_text import ChoiceText
from services.gateway.logprob_fields import PlacedTokens
from shared.messages import Finished, PositionLogprobs
from shared.sampling import FinishReason

_NO_PLACES: Final = PlacedTokens()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice: text, and the tokens behind it (`placed` with logprobs only).

    With logprobs the tokens of which all text is held back are held back too: where they begin is
    not known yet.
    """

    text: str
    token_ids: Sequence[int]
    placed: PlacedTokens


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What a request asked of each choice.

    `first_offset` is the length of what stands before the generated text (an echoed prompt).
    """

    stop_token_ids: Collection[int]
    stream_interval: int
    has_logprobs: bool
    first_offset: int


class Choice:
    """Grows by pieces; gives what is new as a delta."""

    def __init__(self, text: ChoiceText, rules: ChoiceRules) -> None:
        self._text = text
        self._rules = rules
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._has_spoken = False
        self.ending: Ending | None = None
        self.needs_stop = False
        """It ended by a stop string of which the scheduler knows nothing."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated, up to the one that completed a stop string."""
        return self._text.num_tokens

    @property
    def mean_logprob(self) -> float:
        """Of all tokens, none of which was told yet; an answer without any is certain."""
        if not self._logprobs:
            return 0.0
        return math.fsum(places.chosen for places in self._logprobs) / len(self._logprobs)

    @property
    def has_text(self) -> bool:
        """Whether there is text that is not told yet."""
        return bool(self._parts)

    @property
    def is_due(self) -> bool:
        """Whether its text should be told now: the first at once, the last, or enough tokens."""
        if not self._parts:
            return False
        is_enough = self._num_ready >= self._rules.stream_interval
        return is_enough or not self._has_spoken or self.ending is not None

    def feed(self, piece: Piece) -> None:
        """Take what came. Raises: Failure if the sequence ended with an error."""
        if self.ending is not None:
            return
        before = self.num_tokens
        self._add(self._text.feed(piece.token_ids))
        num_new = self.num_tokens - before
        self._token_ids += piece.token_ids[:num_new]
        if self._rules.has_logprobs:
            self._logprobs += piece.logprobs[:num_new]
        finished = piece.finished
        if finished is not None and self._text.matched is None:
            if finished.reason is FinishReason.ERROR:
                raise failures.of_finish(finished)
            self._add(self._text.finish())
        if (matched := self._text.matched) is not None:
            self.ending = Ending("stop", matched)
            self.needs_stop = finished is None
        elif finished is not None:
            self.ending = self._ending_of(finished)

    def break_off(self) -> bool:
        """The answer ends here by an error: nothing is held back. Whether there is more to tell."""
        if self.ending is None:
            self._add(self._text.finish())
        return bool(self._parts or self._token_ids)

    def delta(self) -> Delta:
        """All that is new since the last call."""
        if not self._rules.has_logprobs:
            token_ids, self._token_ids = self._token_ids, []
            placed = _NO_PLACES
        else:
            count = self._num_ready
            token_ids, self._token_ids = self._token_ids[:count], self._token_ids[count:]
            logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
            first = self._rules.first_offset
            offsets = [first + offset for offset in self._text.take_offsets()]
            placed = PlacedTokens(token_ids, logprobs, offsets)
        delta = Delta("".join(self._parts), token_ids, placed)
        self._parts = []
        self._has_spoken = True
        return delta

    @property
    def _num_ready(self) -> int:
        """Tokens that can be told now."""
        return self._text.num_placed if self._rules.has_logprobs else len(self._token_ids)

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _ending_of(self, finished: Finished) -> Ending:
        stop_id = finished.stop_token_id
        named = stop_id if stop_id in self._rules.stop_token_ids else None
        return Ending(finished.reason.value, named)
