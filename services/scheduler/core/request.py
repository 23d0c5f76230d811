"""A request and its sequences: what the scheduler remembers of one client's wish."""

from dataclasses import dataclass

from services.scheduler.core.decoding import Decoding
from services.scheduler.core.events import Gateway
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.lifecycle import Change, Status, status_after
from shared.errors import ErrorCode
from shared.ids import Ids, RequestId, SequenceId
from shared.messages import Submit, Usage
from shared.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. `stop_token_id` is its last token if that one ended it.

    With reason ERROR, `error` says what happened and `code` what kind of thing it was.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    code: ErrorCode | None = None

    @classmethod
    def broken(cls, error: str, code: ErrorCode = ErrorCode.INTERNAL) -> "Finish":
        """An end that is not the client's doing."""
        return cls(FinishReason.ERROR, error=error, code=code)


@dataclass(frozen=True, slots=True)
class Listed:
    """One sequence when its gateway last listed it: what the gateway held, and what we had."""

    position: int
    num_generated: int
    is_finished: bool


class Sequence:
    """One growing list of tokens. `num_computed` chases `num_tokens`: that is all of scheduling.

    A prompt, a chunk of one, a decode, a recompute after giving way and a stream resumed after a
    restart differ only in how far apart the two numbers are.
    """

    __slots__ = ("finish", "generated", "index", "prompt", "sequence_id", "table")

    def __init__(
        self, sequence_id: SequenceId, index: int, prompt: Ids, generated: Ids = ()
    ) -> None:
        self.sequence_id = sequence_id
        self.index = index
        self.prompt = prompt
        self.generated = list(generated)
        self.table: BlockTable | None = None
        self.finish: Finish | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and those generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the pool, once the plans sent have run."""
        return self.table.num_filled if self.table is not None else 0

    @property
    def num_to_compute(self) -> int:
        """Tokens known but not computed: 1 for a decode, more for a prompt."""
        num_computed = self.table.num_filled if self.table is not None else 0
        return len(self.prompt) + len(self.generated) - num_computed  # read thrice a row and step

    def token_ids(self, first: int, last: int) -> Ids:
        """Tokens at positions first .. last - 1. Costs only their number."""
        split = len(self.prompt)
        if first >= split:
            return tuple(self.generated[first - split : last - split])
        if last <= split:
            return self.prompt[first:last]
        return (*self.prompt[first:], *self.generated[: last - split])


class Request:
    """One client request: one or more sequences that start, give way and come back together."""

    def __init__(
        self,
        submit: Submit,
        *,
        gateway: Gateway,
        arrival: float,
        max_tokens: int,
        decoding: Decoding,
        sequences: tuple[Sequence, ...],
    ) -> None:
        self.submit = submit
        self.gateway = gateway
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.decoding = decoding
        self.sequences = sequences
        self.status = Status.WAITING
        self.num_losses = 0
        """Executors lost in a row while they computed this request's next token."""
        self.was_prompt_counted = False
        self.last_heard = arrival
        """When its gateway last showed that it knows this request."""
        self.listed: tuple[Listed, ...] = ()
        """Its sequences at its gateway's last heartbeat; () before the first."""

    @property
    def request_id(self) -> RequestId:
        """The gateway's name for it."""
        return self.submit.request_id

    @property
    def is_live(self) -> bool:
        """Whether some sequence still grows."""
        return self.status is not Status.FINISHED

    @property
    def live_sequences(self) -> tuple[Sequence, ...]:
        """Those that still grow."""
        return tuple([sequence for sequence in self.sequences if sequence.finish is None])

    def change(self, change: Change) -> None:
        """Take one step of the lifecycle. Raises: InvariantBroken if it is no step of it."""
        self.status = status_after(self.status, change)

    def usage(self) -> Usage:
        """What the request cost so far; the token that stops a sequence counts."""
        return Usage(
            prompt_tokens=len(self.submit.prompt),
            completion_tokens=sum(len(sequence.generated) for sequence in self.sequences),
        )
