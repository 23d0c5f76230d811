"""Everything the core may ask of its shell. The shell carries it out and decides nothing."""

from dataclasses import dataclass
from typing import TypeAlias

from services.scheduler.core.events import Gateway
from shared.messages import SchedulerReply, StepPlan


@dataclass(frozen=True, slots=True)
class RunStep:
    """Send this plan to the executor."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this message to a gateway; if it cannot be sent it is lost (a heartbeat mends it)."""

    gateway: Gateway
    message: SchedulerReply


Command: TypeAlias = RunStep | Reply
