"""A request: what the scheduler remembers of one client's wish."""

from dataclasses import dataclass
from math import inf
from typing import Final

from services.scheduler.core.beam_search import BeamSearch
from services.scheduler.core.bill import Bill
from services.scheduler.core.decoding import Decoding
from services.scheduler.core.events import Gateway
from services.scheduler.core.lifecycle import Change, Status, status_after
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.ids import RequestId
from shared.messages import PositionLogprobs, Submit, Usage

SUSPECT_AFTER_LOSSES: Final = 2


@dataclass(frozen=True, slots=True)
class Listed:
    """One sequence when its gateway last listed it: what the gateway held, and what we had."""

    position: int
    num_generated: int
    is_finished: bool


class Request:
    """One client request: one or more sequences that start, give way and come back together.

    `sequences` are the answers. They grow themselves, but for a beam search: there `beams` grow,
    and the answers get their tokens at its end.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        gateway: Gateway | None,
        arrival: float,
        max_tokens: int,
        decoding: Decoding,
        sequences: tuple[Sequence, ...],
        bill: Bill | None = None,
        is_pin: bool = False,
    ) -> None:
        self.submit = submit
        self.is_pin = is_pin
        """Whether it is no client's, but computes and holds a pinned prefix (pins.py)."""
        self.gateway = gateway
        """Who may give it up; None once its gateway has detached it."""
        self.detached_at: float | None = None
        """Since when nobody reads its stream; None: somebody does (detached.py)."""
        self.is_told = False
        """Whether it was detached only for a client that may have lost the last of its answer."""
        self.kept_bytes = 0
        """About how much memory it takes, once it is over and detached; 0 before."""
        self.arrival = arrival
        self.max_tokens = 0
        self.decoding = decoding
        self.sequences = sequences
        self.search: BeamSearch | None = None
        self.beams: tuple[Sequence, ...] = ()
        """What grows in place of the answers while a beam search goes on (beams.py)."""
        self.num_spare_seats = 0
        """Beams that it has not yet: they may come, so their places among the running are kept."""
        self.limit(max_tokens)
        self.status = Status.WAITING
        self.is_queued = not is_pin
        """Whether it has yet to take its first step: the queue's limits count it (book.py)."""
        self.prompt_logprobs = list(submit.prompt_logprobs)
        """Of the prompt's tokens from the second on, as far as they are scored."""
        self.num_unscored = _num_to_score(submit) - len(self.prompt_logprobs)
        """How many of these were asked for and are not here yet."""
        self.num_cached: int | None = None
        """Tokens that its first start found in the prefix cache; None before it."""
        self.root = b""
        """Where the hashes of its blocks begin; b"" until somebody wants them (kv/prefix.py)."""
        self.is_protected = is_pin
        """Whether it gives way to nobody: it came back and has no new token yet, or is a pin."""
        self.num_losses = 0
        """Executors lost in a row while they computed this request's next token."""
        self.was_prompt_counted = False
        self.bill = bill
        """What it costs in blocks, if anybody wants to know."""
        self.waits_since = arrival
        """When it began to wait, or to be swapped out, the last time."""
        self.last_heard = arrival
        """When its gateway last showed that it knows this request, or when it ended since."""
        self.listed: tuple[Listed, ...] = ()
        """Its sequences at its gateway's last heartbeat; () before the first."""

    @property
    def request_id(self) -> RequestId:
        """The gateway's name for it."""
        return self.submit.request_id

    @property
    def priority(self) -> int:
        """The lower, the sooner it is served."""
        return self.submit.priority

    @property
    def expires_at(self) -> float:
        """When it is too late for anything more; infinite if it has no deadline."""
        deadline_s = self.submit.deadline_s
        return inf if deadline_s is None else self.arrival + deadline_s

    @property
    def is_detached(self) -> bool:
        """Whether nobody reads its stream now."""
        return self.detached_at is not None

    @property
    def reader(self) -> Gateway | None:
        """The gateway that hears of it now."""
        return self.gateway if self.detached_at is None else None

    @property
    def is_live(self) -> bool:
        """Whether some sequence still grows."""
        return self.status is not Status.FINISHED

    @property
    def live_sequences(self) -> tuple[Sequence, ...]:
        """Those that still grow, and may hold blocks: its beams, or else its unfinished answers."""
        if self.beams:
            return self.beams
        sequences = self.sequences
        if len(sequences) == 1 and sequences[0].finish is None:
            return sequences  # of nearly all requests
        return self.live_answers

    @property
    def live_answers(self) -> tuple[Sequence, ...]:
        """Those of its answers that have not ended."""
        return tuple([sequence for sequence in self.sequences if sequence.finish is None])

    @property
    def every_sequence(self) -> tuple[Sequence, ...]:
        """All of which anything is remembered: answers, ended or not, and beams."""
        return (*self.sequences, *self.beams)

    @property
    def holds_blocks(self) -> bool:
        """Whether it has blocks in one of the pools."""
        return self.status in (Status.RUNNING, Status.SWAPPED, Status.PINNED)

    @property
    def is_suspect(self) -> bool:
        """Whether executors died twice in a row in its steps."""
        return self.num_losses >= SUSPECT_AFTER_LOSSES

    @property
    def num_seats(self) -> int:
        """How many count as running while it runs: those that grow, and beams yet to come."""
        return len(self.live_sequences) + self.num_spare_seats

    @property
    def takes_hits(self) -> bool:
        """Whether it may skip what the prefix cache has: not if every place is to be scored."""
        return not self.num_unscored

    def limit(self, max_tokens: int) -> None:
        """It may generate so many tokens and no more."""
        self.max_tokens = max_tokens
        for sequence in self.every_sequence:
            sequence.goal = len(sequence.prompt) + max(max_tokens - 1, 0)

    @property
    def scores(self) -> tuple[PositionLogprobs, ...]:
        """The log-probabilities of the prompt, once all asked for are here; until then ()."""
        return () if self.num_unscored else tuple(self.prompt_logprobs)

    def add_scores(self, logprobs: tuple[PositionLogprobs, ...]) -> None:
        """The next of `prompt_logprobs`. Raises: InvariantBroken if so many were not asked for."""
        if len(logprobs) > self.num_unscored:
            raise InvariantBroken(
                f"{self.request_id}: {len(logprobs)} scores, {self.num_unscored} are asked for"
            )
        self.prompt_logprobs += logprobs
        self.num_unscored -= len(logprobs)

    def change(self, change: Change) -> None:
        """Take one step of the lifecycle. Raises: InvariantBroken if it is no step of it."""
        self.status = status_after(self.status, change)

    def usage(self) -> Usage:
        """What the request cost so far; the token that stops a sequence counts.

        A resumed request may find tokens of its answer in the cache: they are not of its prompt.
        """
        return Usage(
            prompt_tokens=len(self.submit.prompt),
            completion_tokens=sum(len(sequence.generated) for sequence in self.sequences),
            cached_tokens=min(self.num_cached or 0, len(self.submit.prompt)),
            bill=self.bill.told() if self.bill is not None else None,
        )


def _num_to_score(submit: Submit) -> int:
    """Prompt tokens whose log-probability is asked for: all that another one precedes."""
    return 0 if submit.sampling.prompt_logprobs is None else len(submit.prompt) - 1
