"""A sequence: what the scheduler remembers of one growing answer, and how it ended."""

from dataclasses import dataclass

from services.scheduler.core.kv.table import BlockTable
from shared.errors import ErrorCode
from shared.ids import Ids, SequenceId
from shared.messages import PositionLogprobs
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


class Sequence:
    """One growing list of tokens. `num_computed` chases `num_tokens`: that is all of scheduling.

    A prompt, a chunk of one, a decode, a recompute after giving way and a stream resumed after a
    restart differ only in how far apart the two numbers are.
    """

    __slots__ = ("finish", "generated", "index", "logprobs", "prompt", "sequence_id", "table")

    def __init__(
        self,
        sequence_id: SequenceId,
        index: int,
        prompt: Ids,
        generated: Ids = (),
        logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> None:
        self.sequence_id = sequence_id
        self.index = index
        self.prompt = prompt
        self.generated = list(generated)
        self.logprobs = list(logprobs)
        """One for each generated token if the request asks for them; else none."""
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
