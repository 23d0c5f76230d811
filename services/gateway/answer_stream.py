"""What has come back for one request so far, between the link that fills it and its reader."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shared.errors import ErrorCode
from shared.ids import Boot, RequestId
from shared.messages import (
    Accepted,
    Finished,
    GeneratedSequence,
    Refused,
    StreamPosition,
    Submit,
    TokenRun,
    Usage,
)
from shared.sampling import FinishReason


class StreamRefused(Exception):
    """The request ended without an answer; `refused` says why."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one sequence; `finished` comes with its last tokens, once."""

    sequence: int
    token_ids: Sequence[int]
    finished: Finished | None


@dataclass(slots=True)
class _Sequence:
    """One choice: all its tokens, and how many of them the reader has taken."""

    token_ids: list[int] = field(default_factory=list)
    taken: int = 0
    finished: Finished | None = None
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        return self.finished is not None and len(self.token_ids) >= self.finished.length

    def as_generated(self) -> GeneratedSequence:
        finish = self.finished.reason if self.finished and self.is_complete else None
        return GeneratedSequence(tuple(self.token_ids), finish)

    @property
    def has_news(self) -> bool:
        return self.taken < len(self.token_ids) or (self.is_complete and not self.is_reported)


class AnswerStream:
    """One request's tokens. The link's half never blocks; the reader takes all there is at once.

    `submitted_to` is the scheduler life that has the request, since `submitted_at` (monotonic
    seconds); `times_given_again` counts its losses since a scheduler accepted it, or sent a token.

    Bounded by nature: a slow reader finds more tokens at its next turn, and no more than the
    request may generate (`max_tokens` or the context) are ever kept; a resubmission needs them.
    """

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.submitted_to: Boot | None = None
        self.submitted_at = 0.0
        self.times_given_again = 0
        self._is_accepted = False
        self._began = time.monotonic()
        self._sequences = [_Sequence() for _ in range(submit.sampling.n)]
        self._refused: Refused | None = None
        self._news = asyncio.Event()

    @property
    def request_id(self) -> RequestId:
        """Ours, never the client's."""
        return self.submit.request_id

    @property
    def is_complete(self) -> bool:
        """Everything has arrived."""
        return all(sequence.is_complete for sequence in self._sequences)

    @property
    def is_refused(self) -> bool:
        """It ended without an answer."""
        return self._refused is not None

    @property
    def is_over(self) -> bool:
        """Nothing more is needed of a scheduler."""
        return self.is_refused or self.is_complete

    @property
    def position(self) -> StreamPosition:
        """How many tokens of each choice are here."""
        lengths = tuple([len(sequence.token_ids) for sequence in self._sequences])
        return StreamPosition(self.request_id, lengths)

    # ------------------------------------------------------------------ the reader's half

    async def wait_accepted(self, timeout_s: float) -> bool:
        """Whether the scheduler has taken the request; False if it said nothing in time.

        Raises: StreamRefused.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_accepted:
                    self._raise_if_refused()
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def next(self, timeout_s: float | None = None) -> list[Piece]:
        """All that is new, at least one piece; or none if nothing came in `timeout_s`.

        Raises: StreamRefused after all that came before it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (pieces := self._take()):
                    self._raise_if_refused()
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return []
        return pieces

    def _take(self) -> list[Piece]:
        pieces = []
        for index, sequence in enumerate(self._sequences):
            if sequence.has_news:
                new = sequence.token_ids[sequence.taken :]
                sequence.taken = len(sequence.token_ids)
                sequence.is_reported = sequence.is_complete
                finished = sequence.finished if sequence.is_complete else None
                pieces.append(Piece(index, new, finished))
        return pieces

    def _raise_if_refused(self) -> None:
        if self._refused is not None:
            raise StreamRefused(self._refused)

    # ------------------------------------------------------------------ the link's half

    def accepted(self, message: Accepted) -> None:
        """The scheduler has taken the request (which may wait there for its first token)."""
        self._is_accepted = True
        self.times_given_again = 0
        self._news.set()

    def arrived(self, run: TokenRun) -> bool:
        """New tokens; what is here already is skipped. False if some before them are missing."""
        if not 0 <= run.sequence < len(self._sequences):
            return True
        tokens = self._sequences[run.sequence].token_ids
        if run.start > len(tokens):
            return False
        new = run.token_ids[len(tokens) - run.start :]
        if new:
            tokens.extend(new)
            self._is_accepted = True
            self.times_given_again = 0
            self._news.set()
        return True

    def ended(self, message: Finished) -> None:
        """A sequence is over; its last tokens may still be on their way."""
        if 0 <= message.sequence < len(self._sequences):
            sequence = self._sequences[message.sequence]
            if sequence.finished is None:
                sequence.finished = message
                self._is_accepted = True
                self._news.set()

    def stopped(self, sequence: int) -> None:
        """The reader found a stop string and needs no more tokens, only the end."""
        progress = self._sequences[sequence]
        if progress.finished is None:
            progress.finished = self._end_of(sequence, FinishReason.STOP)

    def refused(self, message: Refused) -> None:
        """The request ended without (the rest of) an answer."""
        if self._refused is None:
            self._refused = message
            self._news.set()

    def fail(self, code: ErrorCode, why: str) -> None:
        """End the request from our side."""
        self.refused(Refused(self.request_id, code, why))

    def resubmission(self) -> Submit:
        """The request as a scheduler needs it that knows nothing of it."""
        generated = tuple([sequence.as_generated() for sequence in self._sequences])
        has_begun = any(sequence.token_ids for sequence in self._sequences) or any(
            sequence.is_complete for sequence in self._sequences
        )
        return replace(
            self.submit,
            generated=generated if has_begun else (),
            age_s=self.submit.age_s + time.monotonic() - self._began,
        )

    def _end_of(self, sequence: int, reason: FinishReason) -> Finished:
        length = len(self._sequences[sequence].token_ids)
        usage = Usage(len(self.submit.prompt), length)
        return Finished(self.request_id, sequence, reason, length, usage)
