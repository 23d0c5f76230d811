"""What has come back for one request so far, between the link that fills it and its reader."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shared.errors import ErrorCode
from shared.ids import Boot, RequestId
from shared.messages import (
    Accepted,
    Attached,
    Finished,
    GeneratedSequence,
    KVBill,
    PositionLogprobs,
    Refused,
    StreamPosition,
    Submit,
    TokenRun,
    Usage,
)
from shared.sampling import FinishReason

_NO_LOGPROBS = "the scheduler sent tokens without the log-probabilities that were asked for"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one sequence; `finished` comes with its last tokens, once.

    `logprobs` has an entry a token if the request asks for them; `prompt_logprobs` are those of
    prompt[1:], the same with every piece.
    """

    sequence: int
    token_ids: Sequence[int]
    finished: Finished | None
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()


@dataclass(slots=True)
class _Sequence:
    """One choice: all its tokens, and how many of them the reader has taken."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    taken: int = 0
    finished: Finished | None = None
    is_settled: bool = False
    """The scheduler itself has said that it ended, and so what it cost."""
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        return self.finished is not None and len(self.token_ids) >= self.finished.length

    @property
    def has_failed(self) -> bool:
        return self.finished is not None and self.finished.reason is FinishReason.ERROR

    def as_generated(self) -> GeneratedSequence:
        finish = self.finished.reason if self.finished and self.is_complete else None
        return GeneratedSequence(tuple(self.token_ids), finish, tuple(self.logprobs))

    @property
    def has_news(self) -> bool:
        return self.taken < len(self.token_ids) or (self.is_complete and not self.is_reported)


class AnswerStream:
    """One request's tokens. The link's half never blocks; the reader takes all there is at once.

    `on_news` is called whenever something came. `submitted_to` is the scheduler life that has the
    request, since `submitted_at` (monotonic seconds); `times_given_again` counts its losses since
    a scheduler accepted it, or sent a token.

    Bounded by nature: a slow reader finds more tokens at its next turn, and no more than the
    request may generate (`max_tokens` or the context) are ever kept; a resubmission needs them.
    """

    def __init__(self, submit: Submit, on_news: Callable[[], None]) -> None:
        self.submit = submit
        self.on_news = on_news
        self.submitted_to: Boot | None = None
        self.submitted_at = 0.0
        self.times_given_again = 0
        self.is_accepted = False
        self._max_tokens: int | None = None
        """What the scheduler that took it last lets it generate."""
        self.refusal: Refused | None = None
        """It ended without (the rest of) an answer, and why."""
        self.is_ours_to_cancel = False
        """The refusal is our own: the scheduler knows nothing of it."""
        self._began = time.monotonic()
        self._sequences = [_Sequence() for _ in range(submit.sampling.n)]
        self._has_prompt_logprobs = submit.sampling.prompt_logprobs is None or (
            len(submit.prompt) == 1
        )
        self._prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self._wants_logprobs = (
            submit.sampling.logprobs is not None or submit.sampling.prompt_logprobs is not None
        )
        self.num_cached: int | None = None
        """Prompt tokens that were found in the cache, once a scheduler said so."""
        self.bill: KVBill | None = None
        """What it cost so far at the scheduler that has it now, if that keeps bills."""

    @classmethod
    def taken_over(cls, attached: Attached, boot: Boot | None) -> "AnswerStream":
        """The stream of a request that another reader had; that scheduler life still has it.

        It has no reader yet: `on_news` is to be set.
        """
        stream = cls(attached.submit, _nobody)
        stream.submitted_to, stream.submitted_at = boot, time.monotonic()
        stream.is_accepted = True
        if len(attached.prompt_logprobs) == len(attached.submit.prompt) - 1:
            stream._prompt_logprobs = attached.prompt_logprobs
            stream._has_prompt_logprobs = True
        for sequence, so_far in zip(stream._sequences, attached.sequences, strict=False):
            sequence.token_ids = list(so_far.token_ids)
            sequence.logprobs = list(so_far.logprobs)
        return stream

    @property
    def request_id(self) -> RequestId:
        """Ours, never the client's."""
        return self.submit.request_id

    @property
    def is_complete(self) -> bool:
        """Everything has arrived."""
        return self._is_scored and all(sequence.is_complete for sequence in self._sequences)

    @property
    def is_settled(self) -> bool:
        """Whether a scheduler has said what was cached and, if it keeps one, the whole bill."""
        if self.num_cached is None or self.bill is None:
            return self.num_cached is not None
        return all(sequence.is_settled for sequence in self._sequences)

    @property
    def is_refused(self) -> bool:
        """It ended without an answer."""
        return self.refusal is not None

    @property
    def is_over(self) -> bool:
        """Nothing more is needed of a scheduler."""
        return self.is_refused or self.is_complete

    @property
    def position(self) -> StreamPosition:
        """How many tokens of each choice are here."""
        lengths = tuple([len(sequence.token_ids) for sequence in self._sequences])
        return StreamPosition(self.request_id, lengths)

    @property
    def _is_scored(self) -> bool:
        """Whether the prompt's logprobs are here, if any are to come."""
        return self._has_prompt_logprobs or any(one.has_failed for one in self._sequences)

    # ------------------------------------------------------------------ the reader's half

    def take(self) -> list[Piece]:
        """All that is new; nothing before the prompt's logprobs, if they were asked for."""
        pieces: list[Piece] = []
        if not self._is_scored:
            return pieces
        for index, sequence in enumerate(self._sequences):
            if sequence.has_news:
                taken, sequence.taken = sequence.taken, len(sequence.token_ids)
                sequence.is_reported = is_complete = sequence.is_complete
                pieces.append(
                    Piece(
                        index,
                        sequence.token_ids[taken:],
                        sequence.finished if is_complete else None,
                        sequence.logprobs[taken:],
                        self._prompt_logprobs,
                    )
                )
        return pieces

    def let_logprobs_go(self) -> Sequence[PositionLogprobs]:
        """The prompt's, for the last time; of a request that is over, which needs none any more."""
        of_prompt, self._prompt_logprobs = self._prompt_logprobs, ()
        for sequence in self._sequences:
            sequence.logprobs = []
        return of_prompt

    # ------------------------------------------------------------------ the link's half

    def accepted(self, message: Accepted) -> None:
        """The scheduler has taken the request (which may wait there for its first token)."""
        self._max_tokens = message.max_tokens
        self._progressed()

    def arrived(self, run: TokenRun) -> bool:
        """New tokens; what is here already is skipped. False if some before them are missing."""
        if not 0 <= run.sequence < len(self._sequences):
            return True
        sequence = self._sequences[run.sequence]
        have = len(sequence.token_ids)
        if run.start > have:
            return False
        if self._wants_logprobs and not self._has_asked_logprobs(run):
            self.fail(ErrorCode.INTERNAL, _NO_LOGPROBS)
            return True
        is_news = False
        if not self._has_prompt_logprobs and (
            len(run.prompt_logprobs) == len(self.submit.prompt) - 1
        ):
            self._prompt_logprobs = run.prompt_logprobs
            self._has_prompt_logprobs = True
            is_news = True
        if new := run.token_ids[have - run.start :]:
            sequence.token_ids.extend(new)
            sequence.logprobs.extend(run.logprobs[have - run.start :])
            is_news = True
        if is_news:
            self._progressed()
        return True

    def _has_asked_logprobs(self, run: TokenRun) -> bool:
        sampling = self.submit.sampling
        if sampling.logprobs is not None and len(run.logprobs) != len(run.token_ids):
            return False
        is_first = run.sequence == 0 and run.start == 0
        if sampling.prompt_logprobs is None or not is_first:
            return True
        return len(run.prompt_logprobs) == len(self.submit.prompt) - 1

    def _progressed(self) -> None:
        self.is_accepted = True
        self.times_given_again = 0
        self.on_news()

    def ended(self, message: Finished) -> None:
        """A sequence is over; its last tokens may still be on their way."""
        if 0 <= message.sequence < len(self._sequences):
            sequence = self._sequences[message.sequence]
            is_news = sequence.finished is None
            if is_news:
                sequence.finished = message
                self.is_accepted = True
            if self.num_cached is None:  # later lives find what the first one had computed
                self.num_cached = min(message.usage.cached_tokens, len(self.submit.prompt))
                is_news = True
            if message.usage.bill is not None:
                self.bill = message.usage.bill
                is_news = is_news or not sequence.is_settled
            sequence.is_settled = True
            if is_news:
                self.on_news()

    def stopped(self, sequence: int) -> None:
        """The reader found a stop string and needs no more tokens, only the end."""
        progress = self._sequences[sequence]
        if progress.finished is None:
            progress.finished = self._end_of(sequence, FinishReason.STOP)

    def refused(self, message: Refused) -> None:
        """The request ended without (the rest of) an answer."""
        if self.refusal is None:
            self.refusal = message
            self.on_news()

    def fail(self, code: ErrorCode, why: str) -> None:
        """End the request from our side; the scheduler may still be at it."""
        self.is_ours_to_cancel = self.refusal is None
        self.refused(Refused(self.request_id, code, why))

    def resubmission(self) -> Submit:
        """The request as a scheduler needs it that knows nothing of it.

        Beams begin again, and end as they did: what has come of them already is not read again. So
        once some has come, they search for as many tokens as before, not for what fits by now.
        """
        sampling = self.submit.sampling
        has_begun = any(one.token_ids or one.is_complete for one in self._sequences)
        if sampling.use_beam_search and has_begun:
            has_begun = False
            if sampling.max_tokens is None:
                sampling = replace(sampling, max_tokens=self._max_tokens)
        return replace(
            self.submit,
            sampling=sampling,
            generated=tuple([one.as_generated() for one in self._sequences]) if has_begun else (),
            age_s=self.submit.age_s + time.monotonic() - self._began,
            prompt_logprobs=self._prompt_logprobs,
            resubmitted=self.is_accepted,
        )

    def _end_of(self, sequence: int, reason: FinishReason) -> Finished:
        length = len(self._sequences[sequence].token_ids)
        usage = Usage(len(self.submit.prompt), length)
        return Finished(self.request_id, sequence, reason, length, usage)


def _nobody() -> None:
    """Nobody waits for news yet."""
