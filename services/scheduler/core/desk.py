"""What gateways ask for: to take a request, give it up, take a stream over, hear what they missed.

Only the gateway a request belongs to may give it up or ask for more of it; `Attach`, or a `Submit`
of the same request, makes another gateway its owner.
"""

from dataclasses import replace

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.decoding import Sample
from services.scheduler.core.endings import Endings
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    Gateway,
    GatewayLost,
    RequestArrived,
    RequestDone,
    StreamsListed,
)
from services.scheduler.core.intake import Limits, check_submit, check_vocabulary
from services.scheduler.core.request import Finish, Request, Sequence
from services.scheduler.core.streams import Outbox, Streams
from shared.errors import ErrorCode, RequestError
from shared.ids import RequestId, SequenceId
from shared.messages import CancelReason, GeneratedSequence, Refused, Submit
from shared.sampling import FinishReason

RETRY_AFTER_S = 1.0


class Desk:
    """Receives every event that comes from a gateway."""

    def __init__(
        self,
        book: Book,
        endings: Endings,
        streams: Streams,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._book = book
        self._endings = endings
        self._streams = streams
        self._outbox = outbox
        self._counters = counters
        self._limits: Limits | None = None
        self._unchecked: dict[RequestId, RequestArrived] = {}
        self._last_sequence_id = 0

    @property
    def num_unchecked(self) -> int:
        """Requests that wait for a model to be known."""
        return len(self._unchecked)

    def opened(self, limits: Limits, at: float) -> None:
        """An executor says what it can take: everybody who is here is checked against that."""
        is_new = limits != self._limits
        self._limits = limits
        if is_new:
            for request in list(self._book):
                if request.is_live:
                    self._check_again(request, limits, at)
        unchecked, self._unchecked = self._unchecked, {}
        for event in unchecked.values():
            self.arrived(event)

    # ----------------------------------------------------------------- arrivals

    def arrived(self, event: RequestArrived) -> None:
        """A new request, or one that is here already and comes again."""
        submit = event.submit
        known = self._book.get(submit.request_id)
        if known is not None:
            self._arrived_again(event, known)
            return
        if self._limits is None:
            self._unchecked[submit.request_id] = event
            return
        try:
            max_tokens = check_submit(submit, self._limits)
        except RequestError as error:
            self._counters.requests_refused[error.code] += 1
            self._refuse(event.gateway, submit.request_id, error.code, error.message, error.param)
            return
        request = Request(
            submit,
            gateway=event.gateway,
            arrival=event.at - submit.age_s,
            max_tokens=max_tokens,
            decoding=Sample(submit.sampling, self._limits.eos_token_ids),
            sequences=self._new_sequences(submit),
        )
        request.last_heard = event.at
        self._book.add(request)
        self._counters.requests_accepted += 1
        self._streams.accepted(request)
        self._end_what_is_over(request, event.at)

    def _arrived_again(self, event: RequestArrived, known: Request) -> None:
        submit = event.submit
        if (submit.prompt, submit.key_hash) != (known.submit.prompt, known.submit.key_hash):
            self._refuse(
                event.gateway,
                submit.request_id,
                ErrorCode.INVALID,
                "request_id: another request has this id; make a new one",
                "request_id",
            )
            return
        self._streams.moved(known, event.gateway, event.at)
        self._streams.accepted(known)
        positions = tuple(len(generated.token_ids) for generated in submit.generated)
        self._streams.bring_up_to_date(known, positions)

    def _new_sequences(self, submit: Submit) -> tuple[Sequence, ...]:
        sequences = []
        for index in range(submit.sampling.n):
            self._last_sequence_id += 1
            is_resumed = index < len(submit.generated)
            generated = submit.generated[index].token_ids if is_resumed else ()
            sequence_id = SequenceId(self._last_sequence_id)
            sequences.append(Sequence(sequence_id, index, submit.prompt, generated))
        return tuple(sequences)

    def _end_what_is_over(self, request: Request, at: float) -> None:
        """End what its tokens end (of a resumed stream, or with max_tokens 0), or its gateway."""
        for sequence in request.live_sequences:
            finish = self._endings.due(request, sequence)
            if sequence.index < len(request.submit.generated):
                told = request.submit.generated[sequence.index].finish
                if told is not None and (finish is None or told is not finish.reason):
                    finish = Finish(told)
            if finish is not None:
                self._endings.end(request, sequence, finish, at)

    def _check_again(self, request: Request, limits: Limits, at: float) -> None:
        """The model or the pool has changed under a live request."""
        try:
            max_tokens = check_submit(request.submit, limits)
            for sequence in request.live_sequences:
                check_vocabulary("generated", sequence.generated, limits.vocab_size)
        except RequestError as error:
            message = f"the executor that came back cannot go on with this: {error.message}"
            self._endings.end_all(request, Finish.broken(message, error.code), at)
            return
        request.decoding = Sample(request.submit.sampling, limits.eos_token_ids)
        if max_tokens < request.max_tokens:
            request.max_tokens = max_tokens
            self._streams.accepted(request)
        for sequence in request.live_sequences:
            if finish := self._endings.due(request, sequence):
                self._endings.end(request, sequence, finish, at)

    # ----------------------------------------------------------------- giving up, going on

    def cancelled(self, event: CancelRequested) -> None:
        """CLIENT_GONE: forgotten in silence. STOP_STRING: ended, and `Finished` says so."""
        cancel = event.cancel
        self._cancel_unchecked(event)
        request = self._own(event.gateway, cancel.request_id)
        if request is None:
            return
        chosen = [
            sequence
            for sequence in request.sequences
            if cancel.sequence is None or sequence.index == cancel.sequence
        ]
        if cancel.reason is CancelReason.STOP_STRING:
            for sequence in chosen:
                if sequence.finish is None:
                    self._endings.end(request, sequence, Finish(FinishReason.STOP), event.at)
                else:
                    self._streams.ended(request, sequence)
        elif len(chosen) == len(request.sequences):
            self._endings.forget(request, event.at)

    def _cancel_unchecked(self, event: CancelRequested) -> None:
        cancel = event.cancel
        waiting = self._unchecked.get(cancel.request_id)
        if waiting is None or waiting.gateway != event.gateway:
            return
        if cancel.reason is CancelReason.CLIENT_GONE:
            del self._unchecked[cancel.request_id]
            return
        generated = waiting.submit.generated or (GeneratedSequence(()),)
        stopped = tuple(
            replace(sequence, finish=FinishReason.STOP)
            if cancel.sequence is None or index == cancel.sequence
            else sequence
            for index, sequence in enumerate(generated)
        )
        submit = replace(waiting.submit, generated=stopped)
        self._unchecked[cancel.request_id] = replace(waiting, submit=submit)

    def done(self, event: RequestDone) -> None:
        """Everything has reached the client; a log, or even a live request, may go."""
        waiting = self._unchecked.get(event.request_id)
        if waiting is not None and waiting.gateway == event.gateway:
            del self._unchecked[event.request_id]
        request = self._own(event.gateway, event.request_id)
        if request is not None:
            self._endings.forget(request, event.at)

    def attached(self, event: AttachRequested) -> None:
        """Another gateway goes on with a stream; a wrong key learns no more than a wrong id."""
        request_id = event.attach.request_id
        if request_id in self._unchecked:
            self._refuse(
                event.gateway,
                request_id,
                ErrorCode.UNAVAILABLE,
                "no model is loaded yet; attach again in a moment",
                retry_after_s=RETRY_AFTER_S,
            )
            return
        request = self._book.get(request_id)
        if request is None or request.submit.key_hash != event.attach.key_hash:
            self._refuse_unknown(event.gateway, request_id)
            return
        self._streams.moved(request, event.gateway, event.at)
        self._streams.attached(request)

    def listed(self, event: StreamsListed) -> None:
        """A heartbeat: what is stalled is sent again, what is not here is refused."""
        for stream in event.streams:
            if stream.request_id in self._unchecked:
                continue
            request = self._own(event.gateway, stream.request_id)
            if request is not None:
                self._streams.listed(request, stream.positions, event.at)
            elif self._book.get(stream.request_id) is not None:
                self._refuse(
                    event.gateway,
                    stream.request_id,
                    ErrorCode.MOVED,
                    "another gateway has taken this stream over",
                )
            else:
                self._refuse_unknown(event.gateway, stream.request_id)

    def lost(self, event: GatewayLost) -> None:
        """Nobody hears its streams, so nobody needs them."""
        for request in self._book.of_gateway(event.gateway):
            self._endings.forget(request, event.at)
        for request_id, waiting in list(self._unchecked.items()):
            if waiting.gateway == event.gateway:
                del self._unchecked[request_id]

    # ----------------------------------------------------------------- answers

    def _own(self, gateway: Gateway, request_id: RequestId) -> Request | None:
        request = self._book.get(request_id)
        return request if request is not None and request.gateway == gateway else None

    def _refuse_unknown(self, gateway: Gateway, request_id: RequestId) -> None:
        message = "unknown request: it is over, or was never here; submit it again"
        self._refuse(gateway, request_id, ErrorCode.UNKNOWN_REQUEST, message)

    def _refuse(
        self,
        gateway: Gateway,
        request_id: RequestId,
        code: ErrorCode,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self._outbox.say(gateway, Refused(request_id, code, message, param, retry_after_s))
