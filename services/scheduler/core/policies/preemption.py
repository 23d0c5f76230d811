"""Who gives way when blocks run out, and what becomes of the victim's blocks."""

from typing import Protocol

from services.scheduler.core.costs import Estimate
from services.scheduler.core.line import Line
from services.scheduler.core.request import Request
from shared.messages import PreemptionMode


class Victim(Protocol):
    """Chooses who gives way."""

    def of(self, running: Line, asker: Request) -> Request | None:
        """Who gives way to `asker`; itself if nobody stands behind it; None: nobody does now.

        Never one that comes before the asker: the planner walks them in order, so that one has its
        row in the plan already (law 2 breaks). Never one that came back and has no new token yet.
        """


class LatestFirst:
    """The last of the order gives way, even if it is the one that asks for a block.

    So the oldest running request always goes on, and nobody is starved. Source: Kwon et al., 4.5.
    """

    def of(self, running: Line, asker: Request) -> Request | None:
        """The greatest (arrival, request id) that is not protected.

        The asker itself gives way only if it is the last: where protected ones stand behind it, it
        waits for them to have their tokens.
        """
        for request in reversed(running):
            if not request.is_protected:
                return request if request is not asker or request is running.last else None
            if request is asker:
                return None
        return None


class Preemption(Protocol):
    """Decides what becomes of a victim's blocks."""

    def mode(self, estimate: Estimate) -> PreemptionMode:
        """How a victim of which this is expected gives way."""


class Swap:
    """Blocks are copied to the CPU pool and come back from there."""

    def mode(self, estimate: Estimate) -> PreemptionMode:
        """Always SWAP; the planner falls back to RECOMPUTE where the CPU pool is full."""
        return PreemptionMode.SWAP


class Recompute:
    """Blocks are dropped; prompt and generated tokens come back later as one prompt."""

    def mode(self, estimate: Estimate) -> PreemptionMode:
        """Always RECOMPUTE."""
        return PreemptionMode.RECOMPUTE


class Auto:
    """What is expected to take less time on this machine; RECOMPUTE where that is not known."""

    def mode(self, estimate: Estimate) -> PreemptionMode:
        """SWAP only if it is known to be cheaper."""
        swap_s, recompute_s = estimate.swap_s, estimate.recompute_s
        if swap_s is not None and recompute_s is not None and swap_s < recompute_s:
            return PreemptionMode.SWAP
        return PreemptionMode.RECOMPUTE
