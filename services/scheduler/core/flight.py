"""Plans that were sent and have no result yet, and the blocks that must outlive them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.ids import SequenceId
from shared.messages import Score, StepPlan


class SentRow(NamedTuple):
    """One row of a plan, and whose it is."""

    request: Request
    sequence: Sequence
    does_sample: bool
    score: Score | None


@dataclass(slots=True)
class SentPlan:
    """A plan in flight.

    `orphans` are tables of its rows that were given up meanwhile (a client left, a stop string was
    found): the executor still writes to their blocks, so they are freed at the result (law 2).
    """

    plan: StepPlan
    rows: dict[SequenceId, SentRow]
    orphans: list[BlockTable] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """Whose rows these are, each once, in the order of the rows."""
        return list({row.request.request_id: row.request for row in self.rows.values()}.values())
