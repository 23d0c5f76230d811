"""A line of requests: always sorted by place, whoever leaves or comes back."""

from bisect import bisect_left
from collections.abc import Iterator

from services.scheduler.core.policies.order import Order, Place
from services.scheduler.core.request import Request
from shared.errors import InvariantBroken


class Line:
    """Requests in the order of their places. Adding and removing cost O(log n) comparisons."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._places: list[Place] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __contains__(self, request: Request) -> bool:
        at = bisect_left(self._places, self._order.place(request))
        return at < len(self._requests) and self._requests[at] is request

    @property
    def first(self) -> Request:
        """Who is served next. Raises: InvariantBroken if nobody is here."""
        return self._at(0)

    @property
    def last(self) -> Request:
        """Who gives way first. Raises: InvariantBroken if nobody is here."""
        return self._at(-1)

    def add(self, request: Request) -> None:
        """Let a request in, at its place. Raises: InvariantBroken if the place is taken."""
        place = self._order.place(request)
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            raise InvariantBroken(f"two requests have the place {place}")
        self._places.insert(at, place)
        self._requests.insert(at, request)

    def remove(self, request: Request) -> None:
        """Let a request out. Raises: InvariantBroken if it is not here."""
        if request not in self:
            raise InvariantBroken(f"{request.request_id} is not in this line")
        at = bisect_left(self._places, self._order.place(request))
        del self._places[at], self._requests[at]

    def _at(self, index: int) -> Request:
        if not self._requests:
            raise InvariantBroken("nobody is in this line")
        return self._requests[index]
