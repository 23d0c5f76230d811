"""Who gives way when blocks run out, and what becomes of the victim's blocks."""

from typing import Protocol

from services.scheduler.core.line import Line
from services.scheduler.core.request import Request
from shared.messages import PreemptionMode


class Victim(Protocol):
    """Chooses who gives way."""

    def of(self, running: Line) -> Request:
        """The victim among the running requests (at least one).

        Never one that comes before the request that asks: the planner walks them in order, so
        that one has its row in the plan already (law 2 breaks).
        """


class LatestFirst:
    """The last of the order gives way, even if it is the one that asks for a block.

    So the oldest running request always goes on, and nobody is starved. Source: Kwon et al., 4.5.
    """

    def of(self, running: Line) -> Request:
        """The greatest (arrival, request id)."""
        return running.last


class Preemption(Protocol):
    """Decides what becomes of a victim's blocks."""

    def mode(self, victim: Request) -> PreemptionMode:
        """How this victim gives way. Only RECOMPUTE is built yet: the planner refuses SWAP."""


class Recompute:
    """Blocks are dropped; prompt and generated tokens come back later as one prompt."""

    def mode(self, victim: Request) -> PreemptionMode:
        """Always RECOMPUTE."""
        return PreemptionMode.RECOMPUTE
