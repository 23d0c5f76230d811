"""Whose executor this is. Pure: time comes as an argument, in seconds on a monotonic clock."""

from dataclasses import dataclass

from shared.ids import Boot
from shared.liveness import SILENCE_S
from shared.messages import Heartbeat


@dataclass
class Adoption:
    """The scheduler that took this executor, if any, and whether it is still there.

    `number` counts adoptions and losses, so that work of an earlier one can be told apart.
    """

    checked_at: float
    heard_at: float = 0.0
    scheduler: Boot | None = None
    number: int = 0

    def adopt(self, scheduler: Boot, now: float) -> bool:
        """A scheduler takes us; False if it is the one that has us already (it repeats itself)."""
        self.heard_at = now
        if self.scheduler == scheduler:
            return False
        self.scheduler = scheduler
        self.number += 1
        return True

    def hear(self, heartbeat: Heartbeat, now: float) -> str | None:
        """A scheduler lives; says why, if this means that it does not count on us."""
        self.heard_at = now
        if self.scheduler is None:
            return None
        if heartbeat.boot != self.scheduler:
            return self.lose("another scheduler")
        if heartbeat.phase:  # it waits for an executor: it has given us up
            return self.lose("the scheduler gave us up")
        return None

    def check(self, now: float) -> str | None:
        """To be called regularly; says why, if the scheduler is lost.

        If this call comes late, we were silent ourselves, and the scheduler has given us up.
        """
        late_s = now - self.checked_at
        self.checked_at = now
        if self.scheduler is None:
            return None
        if now - self.heard_at > SILENCE_S:
            return self.lose(f"the scheduler is silent for {SILENCE_S:.0f} s")
        if late_s > SILENCE_S:
            return self.lose(f"this process stood still for {late_s:.1f} s")
        return None

    def lose(self, why: str) -> str:
        """Belong to nobody."""
        self.scheduler = None
        self.number += 1
        return why
