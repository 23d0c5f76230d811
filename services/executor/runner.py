"""Who carries out checked plans, and how: in two parts, so that the next can begin meanwhile."""

from collections.abc import Mapping
from typing import Protocol

from services.executor.batch import FlatRows
from shared.ids import SequenceId
from shared.messages import StepPlan, StepResult


class Launched(Protocol):
    """A plan on its way. Whoever launched it finishes it, in the order of launching."""

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""

    def finish(self) -> StepResult:
        """Wait until everything of the plan is done; the same result each time."""

    @property
    def tokens(self) -> Mapping[SequenceId, int]:
        """What was drawn, once finished; a sequence whose row failed is not among them."""


class Runner(Protocol):
    """Moves, copies, computes and draws."""

    def launch(self, plan: StepPlan, flat: FlatRows, before: Launched | None) -> Launched:
        """Begin a plan.

        Args:
            plan: checked: it keeps the laws that can be seen from here.
            flat: its rows.
            before: the plan launched before it, for rows that say PREVIOUS; None: there is none
                to go on from. It may be unfinished; the one before that is finished.
        Raises: whatever goes wrong, once nothing of the plan is under way any more.
        """
