"""The statuses of a request and every step between them.

       START             END
WAITING ----> RUNNING ---------> FINISHED
   ^  ^---------'  |  ^             ^
   |   RECOMPUTE   |  | SWAP_IN     |
   |      SWAP_OUT v  |             |
   '------------ SWAPPED -----------'
     RECOMPUTE              END          (WAITING also ends: cancelled, refused)

A pinned prefix is a request too, of which nothing is drawn. Once its tokens are computed it rests:

         PIN              END
RUNNING -----> PINNED ---------> FINISHED
WAITING <-------'  RECOMPUTE: the executor was lost
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from shared.errors import InvariantBroken


class Status(StrEnum):
    """Where a request stands. RUNNING and PINNED ones hold blocks of the GPU pool."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PINNED = "pinned"
    FINISHED = "finished"


class Change(StrEnum):
    """What happens to a request."""

    START = "start"
    RECOMPUTE = "recompute"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    PIN = "pin"
    END = "end"


TRANSITIONS: Final[Mapping[tuple[Status, Change], Status]] = MappingProxyType(
    {
        (Status.WAITING, Change.START): Status.RUNNING,
        (Status.WAITING, Change.END): Status.FINISHED,
        (Status.RUNNING, Change.RECOMPUTE): Status.WAITING,
        (Status.RUNNING, Change.SWAP_OUT): Status.SWAPPED,
        (Status.RUNNING, Change.END): Status.FINISHED,
        (Status.RUNNING, Change.PIN): Status.PINNED,
        (Status.PINNED, Change.RECOMPUTE): Status.WAITING,
        (Status.PINNED, Change.END): Status.FINISHED,
        (Status.SWAPPED, Change.SWAP_IN): Status.RUNNING,
        (Status.SWAPPED, Change.RECOMPUTE): Status.WAITING,
        (Status.SWAPPED, Change.END): Status.FINISHED,
    }
)


def status_after(status: Status, change: Change) -> Status:
    """The status that `change` leads to.

    Raises: InvariantBroken if the change is not in TRANSITIONS.

    >>> status_after(Status.WAITING, Change.START)
    <Status.RUNNING: 'running'>
    """
    try:
        return TRANSITIONS[status, change]
    except KeyError:
        raise InvariantBroken(f"a {status} request cannot {change}") from None
