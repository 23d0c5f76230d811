"""Who comes first, and who gives way."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from services.scheduler.core.request import Request
from shared.ids import RequestId

Place: TypeAlias = tuple[int, float, RequestId]


class Order(Protocol):
    """A total order of requests: the same for waiting and running ones."""

    def place(self, request: Request) -> Place:
        """Where the request stands; smaller is served first. Never changes while it lives."""


class Fcfs:
    """First come, first served; ties go by request id. Giving way does not change the place."""

    def place(self, request: Request) -> Place:
        """(0, arrival, request id): a priority other than 0 is refused at the door."""
        return 0, request.arrival, request.request_id


class Priority:
    """The lowest priority number first; of equals, first come, first served."""

    def place(self, request: Request) -> Place:
        """(priority, arrival, request id)."""
        return request.priority, request.arrival, request.request_id


ORDERS: Final[Mapping[str, Callable[[], Order]]] = MappingProxyType(
    {"fcfs": Fcfs, "priority": Priority}
)
"""By the names of `--scheduling-policy`."""
