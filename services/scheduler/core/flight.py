"""Plans that were sent and have no result yet."""

from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.ids import SequenceId
from shared.messages import Score, StepPlan


class SentRow(NamedTuple):
    """One row of a plan, and whose it is.

    `last` is where its tokens end: all places of `table` before it are computed at the plan's
    result. `draws` are the sequences that get a token from its last logits; with `is_report` the
    sequence is a beam that is told the likeliest ones instead.
    """

    request: Request
    sequence: Sequence
    table: BlockTable
    last: int
    draws: tuple[Sequence, ...]
    score: Score | None
    is_report: bool = False


@dataclass(slots=True)
class SentPlan:
    """A plan in flight.

    Attributes:
        rows: whose tokens are computed, by the sequence of the row.
        swapped_out: whose blocks its `swap_out` moves.
        swapped_in: whose blocks its `swap_in` moves; they may have no row in it.
        num_prompt_tokens: how many of its tokens belong to rows of more than one.
        num_again: how many of its tokens had been computed before and were given up.
        is_doubtful: the plan before it was refused while it was in flight.
    """

    plan: StepPlan
    rows: dict[SequenceId, SentRow]
    swapped_out: list[Request]
    swapped_in: list[Request]
    num_tokens: int
    num_prompt_tokens: int
    num_again: int
    is_doubtful: bool = False

    @property
    def requests(self) -> list[Request]:
        """Whose rows these are, each once, in the order of the rows."""
        return list({row.request.request_id: row.request for row in self.rows.values()}.values())
