"""Requests that came before any model was known: they wait unchecked, in the order they came."""

from dataclasses import replace

from services.scheduler.core.events import CancelRequested, Gateway, RequestArrived
from shared.ids import RequestId
from shared.messages import CancelReason, GeneratedSequence
from shared.sampling import MAX_N, FinishReason


class Lobby:
    """Arrivals by request id, and how many prompt tokens they have together."""

    def __init__(self) -> None:
        self._arrivals: dict[RequestId, RequestArrived] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._arrivals

    def get(self, request_id: RequestId) -> RequestArrived | None:
        """The arrival of that id."""
        return self._arrivals.get(request_id)

    def enter(self, arrival: RequestArrived) -> None:
        """Wait here; an arrival of the same id makes room, and its place is kept."""
        before = self._arrivals.get(arrival.submit.request_id)
        if before is not None:
            self.num_tokens -= len(before.submit.prompt)
        self._arrivals[arrival.submit.request_id] = arrival
        self.num_tokens += len(arrival.submit.prompt)

    def leave(self, request_id: RequestId, gateway: Gateway) -> None:
        """Forget a request, if it is here and this gateway's."""
        arrival = self._arrivals.get(request_id)
        if arrival is not None and arrival.gateway == gateway:
            del self._arrivals[request_id]
            self.num_tokens -= len(arrival.submit.prompt)

    def lose(self, gateway: Gateway) -> None:
        """Forget all of a gateway's."""
        for request_id in list(self._arrivals):
            self.leave(request_id, gateway)

    def cancel(self, event: CancelRequested) -> None:
        """CLIENT_GONE: forgotten. STOP_STRING: remembered as its end, said once it is taken."""
        cancel = event.cancel
        arrival = self._arrivals.get(cancel.request_id)
        if arrival is None or arrival.gateway != event.gateway:
            return
        submit, is_gone = arrival.submit, cancel.reason is CancelReason.CLIENT_GONE
        if is_gone and (cancel.sequence is None or submit.sampling.n == 1):
            self.leave(cancel.request_id, event.gateway)
            return
        num_missing = min(submit.sampling.n, MAX_N) - len(submit.generated)
        stopped = tuple(
            replace(sequence, finish=FinishReason.ABORT if is_gone else FinishReason.STOP)
            if cancel.sequence is None or index == cancel.sequence
            else sequence
            for index, sequence in enumerate(
                (*submit.generated, *(GeneratedSequence(()),) * num_missing)
            )
        )
        submit = replace(submit, generated=stopped)
        self._arrivals[cancel.request_id] = replace(arrival, submit=submit)

    def late(self, at: float) -> list[RequestArrived]:
        """Those whose deadline has passed by now."""
        return [
            event
            for event in self._arrivals.values()
            if event.submit.deadline_s is not None
            and event.submit.deadline_s <= at - event.at + event.submit.age_s
        ]

    def longest_wait_s(self, at: float) -> float:
        """Seconds since the first of their clients asked; 0 if nobody is here."""
        return max([at - e.at + e.submit.age_s for e in self._arrivals.values()], default=0.0)

    def empty(self) -> tuple[RequestArrived, ...]:
        """Everybody leaves, in the order they came."""
        arrivals = tuple(self._arrivals.values())
        self._arrivals.clear()
        self.num_tokens = 0
        return arrivals
