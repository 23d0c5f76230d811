"""Beam search: which beams go on after a step, which texts are the best so far, when it is over.

The same search as transformers' `GenerationMixin._beam_search` (5.24). Of all texts that are one
token longer than a beam, the `width` likeliest that do not stop are the next beams. Whatever stops
among the `width` likeliest is a *hypothesis*; at `max_tokens` all of these are. A hypothesis is
worth the sum of its log-probabilities over its length to the power of `length_penalty`, and the
best `width` are kept. Of equals the earlier beam goes first, then the smaller token id.
"""

from collections.abc import Collection, Iterator
from math import pow
from typing import NamedTuple

from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.ids import Ids
from shared.messages import PositionLogprobs
from shared.sampling import EarlyStopping, SamplingParams


class Branch(NamedTuple):
    """A beam, by its number, and one token more; `score` is the sum of the log-probabilities."""

    parent: int
    token_id: int
    score: float


class Hypothesis(NamedTuple):
    """A text that is over: it stopped, or it has `max_tokens`."""

    value: float
    token_ids: Ids
    logprobs: tuple[PositionLogprobs, ...]
    is_stopped: bool


class BeamSearch:
    """One search. `expand` takes it one token further; it changes no beam."""

    def __init__(self, params: SamplingParams, max_tokens: int, stop_ids: Collection[int]) -> None:
        """`stop_ids` end a text, eos among them if it is not ignored."""
        self._width = params.n
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._min_tokens = params.min_tokens
        self._num_top = params.logprobs
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._scores = [0.0]
        self.hypotheses: list[Hypothesis] = []
        """The best so far, best first; `width` of them when the search is over."""

    def expand(self, beams: tuple[Sequence, ...]) -> list[Branch]:
        """The next beams, best first, once all of these have their reports. None: it is over.

        Raises: InvariantBroken for a beam without a report.
        """
        length = len(beams[0].generated) + 1
        is_last = length >= self._max_tokens
        going_on: list[Branch] = []
        for rank, branch in enumerate(self._branches(beams, length)):
            if len(going_on) == self._width or (is_last and rank == self._width):
                break
            is_stopped = branch.token_id in self._stop_ids
            if not is_last and not is_stopped:
                going_on.append(branch)
            elif rank < self._width:
                self._keep(beams[branch.parent], branch, length, is_stopped=is_stopped)
        if is_last or self._is_over(going_on, length):
            return []
        self._scores = [branch.score for branch in going_on]
        return going_on

    def told(self, beam: Sequence, token_id: int) -> tuple[PositionLogprobs, ...]:
        """What is told of the next token of a beam; () if the request asks for nothing."""
        if self._num_top is None:
            return ()
        report = _report_of(beam)
        chosen = report.top[report.top_ids.index(token_id)]
        told = PositionLogprobs(
            chosen,
            rank=1 + sum(value > chosen for value in report.top),
            top_ids=report.top_ids[: self._num_top],
            top=report.top[: self._num_top],
        )
        return (told,)

    def _branches(self, beams: tuple[Sequence, ...], length: int) -> Iterator[Branch]:
        """All texts that may come next, likeliest first; before `min_tokens` none that stops."""
        barred = self._stop_ids if length <= self._min_tokens else ()
        branches = []
        for parent, (beam, score) in enumerate(zip(beams, self._scores, strict=True)):
            report = _report_of(beam)
            for token_id, value in zip(report.top_ids, report.top, strict=True):
                if token_id not in barred:
                    branches.append((-(score + value), parent, token_id))
        branches.sort()
        return (Branch(parent, token_id, -cost) for cost, parent, token_id in branches)

    def _keep(self, beam: Sequence, branch: Branch, length: int, *, is_stopped: bool) -> None:
        """A text is over; it counts if it is among the best so far. Of equals the earlier one."""
        value = branch.score / pow(length, self._length_penalty)
        hypothesis = Hypothesis(
            value,
            (*beam.generated, branch.token_id),
            (*beam.logprobs, *self.told(beam, branch.token_id)),
            is_stopped,
        )
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda one: -one.value)  # a stable sort
        del self.hypotheses[self._width :]

    def _is_over(self, going_on: list[Branch], length: int) -> bool:
        """Whether no beam is left, or none is taken to become better than what there is.

        What a beam may come to is guessed as transformers does it: from its present length, or,
        with `early_stopping` never and a penalty that favours long texts, from `max_tokens`.
        """
        if not going_on:
            return True
        if len(self.hypotheses) < self._width:
            return False
        if self._early_stopping is EarlyStopping.YES:
            return True
        is_hopeful = self._early_stopping is EarlyStopping.NEVER and self._length_penalty > 0
        guessed_length = self._max_tokens if is_hopeful else length
        best = going_on[0].score / pow(guessed_length, self._length_penalty)
        return best <= self.hypotheses[-1].value


def _report_of(beam: Sequence) -> PositionLogprobs:
    if beam.report is None:
        raise InvariantBroken(f"beam {beam.sequence_id} goes on without its likeliest tokens")
    return beam.report
