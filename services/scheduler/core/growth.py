"""What a step made of each of its rows: a token, scores, a beam's report, or an error.

What the executor says is checked before it is kept: a part of it that is missing, too much or no
number ends that request with an error, and no other.
"""

from typing import Final

from services.scheduler.core.counters import Counters
from services.scheduler.core.flight import SentPlan, SentRow
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish, Sequence
from services.scheduler.core.streams import Streams
from shared.messages import PositionLogprobs, Sampled, Score, Scored, StepResult

_ROUNDING: Final = 1e-3  # a log-probability is at most 0; a sum in float32 may miss it by so much


class Growth:
    """One step result, ready to be asked row by row."""

    def __init__(
        self,
        result: StepResult,
        sent: SentPlan,
        vocab_size: int,
        streams: Streams,
        counters: Counters,
    ) -> None:
        self._failed = {error.sequence_id: error for error in result.row_errors}
        self._sampled = {sampled.sequence_id: sampled for sampled in result.sampled}
        self._scored = {scored.sequence_id: scored for scored in result.scored}
        self._vocab_size = vocab_size
        self._streams = streams
        self._counters = counters
        counters.row_errors += len(self._failed)
        for reports in (self._sampled, self._failed, self._scored):
            if not reports.keys() <= sent.rows.keys():
                drawn = {one.sequence_id for row in sent.rows.values() for one in row.draws}
                counters.reports_ignored += len(reports.keys() - sent.rows.keys() - drawn)

    def grow(self, row: SentRow) -> Finish | None:
        """Keep and tell what this row made. Returns: its end, if something is wrong with it."""
        request, sequence, _, _, draws, score, is_report = row
        if self._failed:
            failed = self._failed.get(sequence.sequence_id)
            if failed is not None:
                live = any(one.finish is None for one in (sequence, *draws))
                is_wanted = live or score is not None  # else it was for an answer that has ended
                return Finish.broken(failed.message, failed.code) if is_wanted else None
        error = ""
        if score is not None:  # the prompt is everybody's, even if who computed it has ended
            error = self._take_scores(request, sequence, score)
        for drawn in draws:
            if drawn.finish is None and not error:
                error = self._take_token(request, drawn)
        if is_report and not error:
            error = self._take_report(row)
        return Finish.broken(error) if error else None

    def _take_token(self, request: Request, sequence: Sequence) -> str:
        sampled = self._sampled.get(sequence.sequence_id)
        token_id = None if sampled is None else sampled.token_id
        if sampled is None or token_id is None:
            return "the executor drew no token for it"
        if not 0 <= token_id < self._vocab_size:
            return f"the executor drew token id {token_id} of {self._vocab_size}"
        num_top = request.submit.sampling.logprobs
        if num_top is not None and (error := self._keep_logprobs(sequence, sampled, num_top)):
            return error
        sequence.generated.append(token_id)
        self._counters.generation_tokens += 1
        request.is_protected = False
        request.num_losses = 0
        if not request.was_prompt_counted:
            self._count_prompt(request)
        self._streams.grew(request, sequence)
        return ""

    def _take_report(self, row: SentRow) -> str:
        """A beam keeps its report if it still has what it was computed from, in either pool."""
        request, beam = row.request, row.sequence
        sampled = self._sampled.get(beam.sequence_id)
        if sampled is None or sampled.logprobs is None:
            return "the executor reported no likeliest tokens for a beam"
        if sampled.token_id is not None:
            return "the executor drew a token for a beam"
        report, (ask,) = sampled.logprobs, request.decoding.asks(beam)
        if error := self._flaw(report, ask.num_top or 0):
            return error
        if len(set(report.top_ids)) < len(report.top_ids):
            return "the executor reported a likeliest token twice"
        if not request.was_prompt_counted:
            self._count_prompt(request)
        if beam.table is row.table or beam.swapped is not None:
            beam.report = report
        return ""

    def _keep_logprobs(self, sequence: Sequence, sampled: Sampled, num_top: int) -> str:
        if sampled.logprobs is None:
            return "the executor reported no log-probabilities for its token"
        if error := self._flaw(sampled.logprobs, num_top):
            return error
        sequence.logprobs.append(sampled.logprobs)
        return ""

    def _take_scores(self, request: Request, sequence: Sequence, score: Score) -> str:
        scored = self._scored.get(sequence.sequence_id)
        if error := self._flaw_of_scores(scored, score):
            return error
        if scored is not None:
            have = len(request.prompt_logprobs) - scored.first_position
            request.add_scores(scored.logprobs[max(have, 0) :])  # some may be here already
        request.num_losses = 0
        if not request.num_unscored and not request.max_tokens:
            if not request.was_prompt_counted:
                self._count_prompt(request)
            self._streams.scored(request)
        return ""

    def _flaw_of_scores(self, scored: Scored | None, score: Score) -> str:
        if scored is None:
            return "the executor scored nothing of its prompt"
        num_asked, num_scored = len(score.token_ids), len(scored.logprobs)
        if (scored.first_position, num_scored) != (score.first_position, num_asked):
            return (
                f"the executor scored {num_scored} prompt tokens at {scored.first_position}; "
                f"{num_asked} at {score.first_position} were asked for"
            )
        flaws = (self._flaw(logprobs, score.num_top) for logprobs in scored.logprobs)
        return next(filter(None, flaws), "")

    def _flaw(self, logprobs: PositionLogprobs, num_top: int) -> str:
        """What is wrong with one place's report; "" for nothing. -inf is a log-probability."""
        top_ids, top = logprobs.top_ids, logprobs.top
        num_top = min(num_top, self._vocab_size)
        if len(top_ids) != num_top or len(top) != num_top:
            return f"the executor reported {len(top_ids)} likeliest tokens instead of {num_top}"
        if top_ids and not (min(top_ids) >= 0 and max(top_ids) < self._vocab_size):
            return f"the executor reported likeliest tokens beyond its {self._vocab_size}"
        if not all(value <= _ROUNDING for value in (logprobs.chosen, *top)):  # no NaN either
            return "the executor reported log-probabilities that are none"
        if logprobs.rank < 1:
            return f"the executor reported rank {logprobs.rank}"
        return ""

    def _count_prompt(self, request: Request) -> None:
        request.was_prompt_counted = True
        self._counters.prompt_tokens += len(request.submit.prompt)
