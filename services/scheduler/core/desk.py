"""What gateways ask for: to take a request, give it up, take a stream over, hear what they missed.

Only the gateway a request belongs to may give it up or ask for more of it; `Attach`, or a `Submit`
of the same request, makes another gateway its owner.
"""

import hmac
from collections.abc import Callable, Iterator
from dataclasses import replace

from services.scheduler.core.beams import Beams
from services.scheduler.core.bill import Bill
from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.decoding import decoding_of
from services.scheduler.core.detached import Detached
from services.scheduler.core.endings import Endings
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    DetachRequested,
    Gateway,
    GatewayLost,
    RequestArrived,
    RequestDone,
    StreamsListed,
)
from services.scheduler.core.intake import Limits, check_submit
from services.scheduler.core.lobby import Lobby
from services.scheduler.core.queue_limits import QueueLimits
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish, Sequence
from services.scheduler.core.steps import Steps
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
        steps: Steps,
        endings: Endings,
        beams: Beams,
        streams: Streams,
        outbox: Outbox,
        counters: Counters,
        queue_limits: QueueLimits,
        detached: Detached,
        stream_ttl_s: float,
        num_pinned: Callable[[], int],
        sequence_ids: Iterator[SequenceId],
    ) -> None:
        """`num_pinned` says how many blocks are kept for pinned prefixes now."""
        self._detached = detached
        self._stream_ttl_s = stream_ttl_s
        self._book = book
        self._steps = steps
        self._endings = endings
        self._beams = beams
        self._streams = streams
        self._outbox = outbox
        self._counters = counters
        self._limits: Limits | None = None
        self._queue_limits = queue_limits
        self._num_pinned = num_pinned
        self._lobby = Lobby()
        self._deadlines = Deadlines(book, self._lobby, endings, outbox, counters)
        self._sequence_ids = sequence_ids

    @property
    def num_unchecked(self) -> int:
        """Requests that wait for a model to be known."""
        return len(self._lobby)

    @property
    def num_queued(self) -> int:
        """Requests that have yet to take their first step; what gave way and waits is none."""
        return self._book.num_queued + len(self._lobby)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of these."""
        return self._book.num_queued_tokens + self._lobby.num_tokens

    def longest_wait_s(self, at: float) -> float:
        """Seconds for which somebody has waited, or been swapped out, by now: the most."""
        return max(self._book.longest_wait_s(at), self._lobby.longest_wait_s(at))

    def opened(self, limits: Limits, at: float) -> None:
        """An executor says what it can take: everybody who is here is checked against that."""
        is_new = limits != self._limits
        self._limits = limits
        if is_new:
            for request in list(self._book):
                if request.is_live:
                    self._check_again(request, limits, at)
        self._deadlines.tick(at)
        for event in self._lobby.empty():
            self._admit(event, limits)

    def tick(self, at: float) -> None:
        """Time passes: the speed of the queue is measured, and who is late ends."""
        self._queue_limits.tick(at, self._book.num_dequeued)
        self._deadlines.tick(at)
        self._detached.tick(at)

    # ----------------------------------------------------------------- arrivals

    def arrived(self, event: RequestArrived) -> None:
        """A new request, or one that is here already and comes again."""
        submit = event.submit
        known = self._book.get(submit.request_id)
        here = known or self._lobby.get(submit.request_id)
        if here is not None and not _is_same(submit, here.submit):
            self._refuse(
                event.gateway,
                submit.request_id,
                ErrorCode.INVALID,
                "request_id: another request has this id; make a new one",
                "request_id",
            )
        elif known is not None:
            self._arrived_again(event, known)
        elif here is None and (why := self._why_full(submit, event.at)):
            self._counters.requests_refused[ErrorCode.QUEUE_FULL] += 1
            self._refuse(
                event.gateway,
                submit.request_id,
                ErrorCode.QUEUE_FULL,
                why,
                retry_after_s=self._queue_limits.retry_after_s(event.at, self._book.num_dequeued),
            )
        elif self._limits is None:
            self._lobby.enter(event)
            self._deadlines.tick_lobby(event.at)
        else:
            self._admit(event, self._limits)

    def _why_full(self, submit: Submit, at: float) -> str:
        """Why the queue has no room for it; "" if it has, as for every resubmitted request."""
        self._queue_limits.tick(at, self._book.num_dequeued)
        if submit.resubmitted:
            return ""
        return self._queue_limits.refusal(
            self.num_queued, self.num_queued_tokens, len(submit.prompt)
        )

    def _admit(self, event: RequestArrived, limits: Limits) -> None:
        submit = event.submit
        if submit.sampling.use_beam_search:  # no beam is resubmitted: the search begins again
            submit = replace(submit, generated=())
        try:
            max_tokens = check_submit(submit, limits.beside(self._num_pinned()))
        except RequestError as error:
            self._counters.requests_refused[error.code] += 1
            self._refuse(event.gateway, submit.request_id, error.code, error.message, error.param)
            return
        request = Request(
            submit,
            gateway=event.gateway,
            arrival=event.at - submit.age_s,
            max_tokens=max_tokens,
            decoding=decoding_of(submit.sampling, limits.eos_token_ids, limits.vocab_size),
            sequences=self._new_sequences(submit),
            bill=Bill() if limits.config.enable_kv_bill else None,
        )
        request.last_heard = event.at
        self._beams.begin(request)
        self._book.add(request)
        self._counters.requests_accepted += 1
        self._streams.accepted(request)
        self._end_what_is_over(request, event.at)
        self._deadlines.check(request, event.at)
        if request.is_live:
            self._steps.prepare(request)

    def _arrived_again(self, event: RequestArrived, known: Request) -> None:
        self._streams.moved(known, event.gateway, event.at)
        self._streams.accepted(known)
        positions = tuple(len(generated.token_ids) for generated in event.submit.generated)
        self._streams.bring_up_to_date(known, positions)

    def _new_sequences(self, submit: Submit) -> tuple[Sequence, ...]:
        only_scores = submit.sampling.max_tokens == 0  # its last token tells of nothing after it
        prompt = submit.prompt[:-1] if only_scores else submit.prompt
        sequences = []
        for index in range(submit.sampling.n):
            is_resumed = index < len(submit.generated)
            so_far = submit.generated[index] if is_resumed else GeneratedSequence(())
            sequences.append(
                Sequence(
                    next(self._sequence_ids),
                    index,
                    prompt,
                    so_far.token_ids,
                    so_far.logprobs,
                )
            )
        return tuple(sequences)

    def _end_what_is_over(self, request: Request, at: float) -> None:
        """End what its tokens end (of a resumed stream, or with max_tokens 0), or its gateway."""
        for sequence in request.live_answers:
            finish = self._endings.due(request, sequence)
            if sequence.index < len(request.submit.generated):
                told = request.submit.generated[sequence.index].finish
                if told is not None and (finish is None or told is not finish.reason):
                    finish = Finish(told)
            if finish is not None:
                self._endings.end(request, sequence, finish, at)

    def _check_again(self, request: Request, limits: Limits, at: float) -> None:
        """The model or the pool has changed under a live request."""
        so_far = [
            GeneratedSequence(tuple(sequence.generated), logprobs=tuple(sequence.logprobs))
            for sequence in request.live_answers
        ]
        try:
            beside_pins = limits.beside(self._num_pinned())
            max_tokens = check_submit(replace(request.submit, generated=tuple(so_far)), beside_pins)
        except RequestError as error:
            message = f"the executor that came back cannot go on with this: {error.message}"
            self._endings.end_all(request, Finish.broken(message, error.code), at)
            return
        request.decoding = decoding_of(
            request.submit.sampling, limits.eos_token_ids, limits.vocab_size
        )
        if max_tokens < request.max_tokens:
            request.limit(max_tokens)
            self._streams.accepted(request)
        self._beams.begin(request)
        for sequence in request.live_answers:
            if finish := self._endings.due(request, sequence):
                self._endings.end(request, sequence, finish, at)

    # ----------------------------------------------------------------- giving up, going on

    def cancelled(self, event: CancelRequested) -> None:
        """CLIENT_GONE: ended in silence, and forgotten whole. STOP_STRING: `Finished` says so."""
        cancel = event.cancel
        self._lobby.cancel(event)
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
        else:
            for sequence in chosen:
                self._endings.give_up(request, sequence, event.at)

    def done(self, event: RequestDone) -> None:
        """Everything has reached the client; a log, or even a live request, may go."""
        self._lobby.leave(event.request_id, event.gateway)
        request = self._own(event.gateway, event.request_id)
        if request is not None:
            self._endings.forget(request, event.at)

    def attached(self, event: AttachRequested) -> None:
        """Another gateway goes on with a stream; a wrong key learns no more than a wrong id."""
        request_id = event.attach.request_id
        if request_id in self._lobby:
            self._refuse(
                event.gateway,
                request_id,
                ErrorCode.UNAVAILABLE,
                "no model is loaded yet; attach again in a moment",
                retry_after_s=RETRY_AFTER_S,
            )
            return
        request = self._book.get(request_id)
        key_hash = request.submit.key_hash if request is not None else b""
        is_same_key = hmac.compare_digest(key_hash, event.attach.key_hash)
        if request is None or not is_same_key or not request.submit.context:
            self._refuse(
                event.gateway,
                request_id,
                ErrorCode.UNKNOWN_STREAM,
                "no such stream: it was told whole, or was never here, or nobody came for it; one "
                f"without a reader is kept for {self._stream_ttl_s:g} s (--stream-ttl), while "
                "there is room",
            )
            return
        self._streams.moved(request, event.gateway, event.at)
        self._streams.attached(request, event.at)
        self._counters.streams_attached += 1

    def detached(self, event: DetachRequested) -> None:
        """Nobody reads a stream now; a request that may come again without one is kept."""
        self._lobby.leave(event.detach.request_id, event.gateway)
        request = self._own(event.gateway, event.detach.request_id)
        if request is not None:
            self._detached.detach(request, event.at, is_told=event.detach.is_told)

    def listed(self, event: StreamsListed) -> None:
        """A heartbeat: what is stalled is sent again, what is not here is refused."""
        for stream in event.streams:
            if stream.request_id in self._lobby:
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
        """Nobody reads its streams: those that can be attached to are kept, others forgotten."""
        self._detached.lose(event.gateway, event.at)
        self._lobby.lose(event.gateway)

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


def _is_same(submit: Submit, here: Submit) -> bool:
    """Whether this is the request that is here already; its key counts, its progress does not."""
    return (submit.prompt, submit.key_hash) == (here.prompt, here.key_hash)
