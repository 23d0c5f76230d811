"""Everything that can happen to the scheduler. `at` is seconds on the shell's monotonic clock."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from shared.ids import RequestId
from shared.messages import (
    Attach,
    Cancel,
    Detach,
    ExecutorReady,
    ListPins,
    Pin,
    StepFailed,
    StepResult,
    StreamPosition,
    Submit,
    Unpin,
)

Gateway = NewType("Gateway", bytes)
"""Return address of a gateway; opaque to the core."""


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A gateway submits (or, after a scheduler restart, resubmits) a request."""

    at: float
    gateway: Gateway
    submit: Submit


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A gateway gives up a sequence or a request."""

    at: float
    gateway: Gateway
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class AttachRequested:
    """A gateway takes over the stream of a request."""

    at: float
    gateway: Gateway
    attach: Attach


@dataclass(frozen=True, slots=True)
class DetachRequested:
    """A gateway has no reader for a stream any more; another one may come."""

    at: float
    gateway: Gateway
    detach: Detach


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Everything of a request has reached its client."""

    at: float
    gateway: Gateway
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StreamsListed:
    """A gateway's heartbeat: its open streams and how much it holds of each."""

    at: float
    gateway: Gateway
    streams: tuple[StreamPosition, ...]


@dataclass(frozen=True, slots=True)
class PinRequested:
    """A gateway pins a prefix."""

    at: float
    gateway: Gateway
    pin: Pin


@dataclass(frozen=True, slots=True)
class UnpinRequested:
    """A gateway lets a pinned prefix go."""

    at: float
    gateway: Gateway
    unpin: Unpin


@dataclass(frozen=True, slots=True)
class PinsListed:
    """A gateway asks which prefixes of a key are pinned."""

    at: float
    gateway: Gateway
    query: ListPins


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway has been silent for too long."""

    at: float
    gateway: Gateway


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """An executor is ready; its pools are empty."""

    at: float
    ready: ExecutorReady


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The executor is gone, and its pools and the plans in flight with it."""

    at: float


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The executor ran a plan."""

    at: float
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepRefused:
    """The executor could not run a plan."""

    at: float
    failed: StepFailed


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: 10 Hz while anything waits or runs."""

    at: float


Event: TypeAlias = (
    RequestArrived
    | CancelRequested
    | AttachRequested
    | DetachRequested
    | RequestDone
    | StreamsListed
    | PinRequested
    | UnpinRequested
    | PinsListed
    | GatewayLost
    | ExecutorJoined
    | ExecutorLost
    | StepFinished
    | StepRefused
    | Tick
)
