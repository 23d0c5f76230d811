"""A sequence: what the scheduler remembers of one growing answer, and how it ended."""

from dataclasses import dataclass

from services.scheduler.core.kv.table import BlockTable
from shared.errors import ErrorCode
from shared.ids import Ids, SequenceId
from shared.messages import PREVIOUS, PositionLogprobs
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

    __slots__ = (
        "ahead", "finish", "generated", "goal", "hashes", "index", "logprobs", "num_common",
        "num_lost", "prompt", "report", "sequence_id", "stem", "swapped", "table",
    )  # fmt: skip

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
        self.swapped: BlockTable | None = None
        """Its blocks in the CPU pool, while its request is swapped out."""
        self.finish: Finish | None = None
        self.ahead = 0
        """Tokens drawn by plans in flight: they are not known yet, but they have a place."""
        self.goal = 0
        """Most places it will ever need: the last token generated is never computed."""
        self.hashes: list[bytes] = []
        """Of its full blocks, as far as somebody wanted them (kv/prefix.py)."""
        self.num_lost = 0
        """Tokens that were computed once and given up: computing them again is a cost."""
        self.report: PositionLogprobs | None = None
        """Of a beam: the likeliest tokens after its last, until all beams of its request know."""
        self.stem: Sequence | None = None
        """Of a beam that comes back: the earlier one that begins with most of its tokens."""
        self.num_common = 0
        """How many tokens these two have in common."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and those generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the pool, once the plans sent have run."""
        return self.table.num_filled if self.table is not None else 0

    @property
    def num_drawn(self) -> int:
        """Tokens generated, those that plans in flight draw included."""
        return len(self.generated) + self.ahead

    @property
    def num_wanted(self) -> int:
        """Places it can use now: of all tokens but the last of its answer."""
        return min(len(self.prompt) + len(self.generated) + self.ahead, self.goal)

    @property
    def num_to_compute(self) -> int:
        """Tokens that have no place yet: 1 for a decode, more for a prompt."""
        table, goal = self.table, self.goal  # read twice a row and step
        wanted = len(self.prompt) + len(self.generated) + self.ahead
        if wanted > goal:
            wanted = goal
        return wanted - table.num_filled if table is not None else wanted

    def token_ids(self, first: int, last: int) -> Ids:
        """Tokens at positions first .. last - 1. Costs only their number.

        A place beyond the tokens known is PREVIOUS: what the plan before draws.
        """
        split, generated = len(self.prompt), self.generated
        num_known = split + len(generated)
        if first == num_known - 1 and generated and last == num_known:
            return (generated[-1],)  # nearly always
        if last > num_known:
            return (*self.token_ids(first, num_known), PREVIOUS)
        if first >= split:
            return tuple(self.generated[first - split : last - split])
        if last <= split:
            return self.prompt[first:last]
        return (*self.prompt[first:], *self.generated[: last - split])
