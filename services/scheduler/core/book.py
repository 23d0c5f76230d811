"""Every request the scheduler knows, in the line its status puts it in.

Pinned prefixes stand in the same lines; but who looks for requests does not find them.
"""

from collections.abc import Iterator
from math import inf

from services.scheduler.core.events import Gateway
from services.scheduler.core.lifecycle import Change, Status
from services.scheduler.core.line import Line
from services.scheduler.core.pins import Pins, Prefix
from services.scheduler.core.policies.order import Order
from services.scheduler.core.request import Request
from shared.errors import InvariantBroken
from shared.ids import RequestId


class Book:
    """Requests by id, and one line for each status that is not the end."""

    def __init__(self, order: Order) -> None:
        self._requests: dict[RequestId, Request] = {}
        self._lines: dict[Status, Line] = {
            status: Line(order) for status in Status if status is not Status.FINISHED
        }
        self.order = order
        self.now = -inf
        """When the present event happened."""
        self.pins = Pins()
        self.num_queued = 0
        """Requests that have yet to take their first step; each arrival is measured by this."""
        self.num_queued_tokens = 0
        """Their prompt tokens."""
        self.num_dequeued = 0
        """Requests that have left this queue so far, by starting or ending."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def waiting(self) -> Line:
        """Who holds no block and wants some."""
        return self._lines[Status.WAITING]

    @property
    def running(self) -> Line:
        """Who takes part in the steps."""
        return self._lines[Status.RUNNING]

    @property
    def swapped(self) -> Line:
        """Whose blocks are in the CPU pool."""
        return self._lines[Status.SWAPPED]

    @property
    def pinned(self) -> Line:
        """The prefixes that are pinned and computed."""
        return self._lines[Status.PINNED]

    @property
    def everyone(self) -> list[Request]:
        """Whoever may hold blocks: all requests, and all pinned prefixes."""
        return [*self, *(prefix.request for prefix in self.pins)]

    def line(self, status: Status) -> Line:
        """The requests of one status that is not the end."""
        return self._lines[status]

    def get(self, request_id: RequestId) -> Request | None:
        """The request of that id, finished or not."""
        return self._requests.get(request_id)

    def of_gateway(self, gateway: Gateway) -> list[Request]:
        """The requests whose tokens go to this gateway, in the order they came."""
        return [request for request in self if request.gateway == gateway]

    def kept(self) -> list[Request]:
        """Those that are over, and those that nobody reads: they are kept for a time."""
        return [one for one in self if one.is_detached or one.status is Status.FINISHED]

    def finished(self) -> list[Request]:
        """Those whose log is kept for a gateway that may miss something."""
        return [request for request in self if request.status is Status.FINISHED]

    def longest_wait_s(self, at: float) -> float:
        """Seconds for which somebody has not run who could: the most, 0 if nobody waits."""
        lines = (self.waiting, self.swapped)
        since = [one.waits_since for line in lines for one in line if not one.is_pin]
        return at - min(since, default=at)

    def add(self, request: Request) -> None:
        """A new request, waiting. Raises: InvariantBroken if its id is known."""
        if request.request_id in self._requests:
            raise InvariantBroken(f"{request.request_id} is in the book already")
        self._lines[request.status].add(request)
        self._requests[request.request_id] = request
        self.num_queued += 1
        self.num_queued_tokens += len(request.submit.prompt)

    def pin(self, prefix: Prefix) -> None:
        """A new prefix, waiting. Raises: InvariantBroken if its id is known."""
        self.pins.add(prefix)
        self._lines[prefix.request.status].add(prefix.request)

    def change(self, request: Request, change: Change) -> None:
        """Take a step of the lifecycle, and change lines. An illegal one changes nothing."""
        before = request.status
        request.change(change)
        if before is Status.RUNNING:
            request.waits_since = self.now
        self._lines[before].remove(request)
        if request.status is not Status.FINISHED:
            self._lines[request.status].add(request)
        if request.is_queued:
            request.is_queued = False
            self.num_queued -= 1
            self.num_queued_tokens -= len(request.submit.prompt)
            self.num_dequeued += 1

    def forget(self, request: Request) -> None:
        """Drop a finished request and its token log. Raises: InvariantBroken if it still lives."""
        if request.status is not Status.FINISHED:
            raise InvariantBroken(f"{request.request_id} is {request.status}, not finished")
        del self._requests[request.request_id]
