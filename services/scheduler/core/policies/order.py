"""Who comes first, and who gives way."""

from typing import Protocol, TypeAlias

from services.scheduler.core.request import Request
from shared.ids import RequestId

Place: TypeAlias = tuple[float, RequestId]


class Order(Protocol):
    """A total order of requests: the same for waiting and running ones."""

    def place(self, request: Request) -> Place:
        """Where the request stands; smaller is served first. Never changes while it lives."""


class Fcfs:
    """First come, first served; ties go by request id. Giving way does not change the place."""

    def place(self, request: Request) -> Place:
        """(arrival, request id)."""
        return request.arrival, request.request_id
