"""The gateway's end of the request link: every open request's tokens, through losses.

Nothing here waits for a socket: what could not be sent is kept and sent at the next beat. Beats
list the open streams, so the scheduler can send again what was lost; a new scheduler boot gets
every open request again, with the tokens that are here.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import Counter

from services.gateway.answer_stream import AnswerStream
from services.gateway.attaching import Attaching, moved
from services.gateway.last_words import LastWord, LastWords, gone
from services.gateway.pins import GatewayPins
from services.gateway.readiness import LinkTimes, Readiness
from shared.curve import ClientKeys
from shared.errors import ErrorCode
from shared.ids import RequestId
from shared.links import Dealer
from shared.liveness import new_boot
from shared.logs import get_logger
from shared.messages import (
    TO_GATEWAY,
    Accepted,
    Attached,
    Cancel,
    CancelReason,
    Detach,
    Done,
    Finished,
    Heartbeat,
    Hello,
    Pinned,
    Pins,
    Refused,
    SchedulerReply,
    Submit,
    Tokens,
    Unpinned,
    Welcome,
)
from shared.metrics import PREFIX, REGISTRY

_GAPS: Final = Counter(
    PREFIX + "token_gaps",
    "Runs of tokens that came before earlier ones of the same stream, mended by a heartbeat",
    registry=REGISTRY,
)
_ATTACHED: Final = Counter(
    PREFIX + "streams_attached",
    "Streams that this gateway took over, to go on with them",
    registry=REGISTRY,
)
_RESUMED: Final = Counter(
    PREFIX + "streams_resumed",
    "Requests given again to a scheduler that had lost them",
    registry=REGISTRY,
)

MAX_TIMES_GIVEN_AGAIN: Final = 3  # without a sign that it was taken in between

_log = get_logger("link")


class SchedulerLink:
    """One gateway life's connection to the scheduler."""

    def __init__(
        self,
        endpoint: str,
        model: str,
        vocab_size: int,
        times: LinkTimes | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self.boot = new_boot()
        self._times = times or LinkTimes()
        self._scheduler = Readiness(model, vocab_size, self._times)
        self._dealer: Dealer[SchedulerReply] = Dealer(
            "request",
            endpoint,
            TO_GATEWAY,
            identity=b"g" + self.boot.to_bytes(8, "little"),
            flag="--request-endpoint",
            keys=keys,
        )
        self.pins = GatewayPins(self._dealer.send)
        self._streams: dict[RequestId, AnswerStream] = {}
        self._last_words = LastWords(self._dealer.send)
        self._attaching = Attaching(
            self._dealer.send, lambda stream: self.release(stream, keeps=True), self._last_words
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_leaving = False
        """Whoever is cut off now is to go on at another gateway."""

    # ------------------------------------------------------------------ state

    @property
    def scheduler(self) -> Readiness:
        """What is known of the other end."""
        return self._scheduler

    @property
    def num_open(self) -> int:
        """Requests that have a reader."""
        return len(self._streams)

    # ------------------------------------------------------------------ requests

    def submit(self, submit: Submit, on_news: Callable[[], None]) -> AnswerStream:
        """Send a request; its tokens arrive at the stream, which says so by `on_news`.

        `release` it, whatever happens.

        Raises: WireError if it has no wire form (far too long).
        """
        stream = AnswerStream(submit, on_news)
        if submit.request_id in self._streams:  # only an id that a client gave can be
            taken = "Last-Event-ID: another request has this id"
            stream.refusal = Refused(submit.request_id, ErrorCode.INVALID, taken, "Last-Event-ID")
            return stream
        self._send_submit(stream)
        self._streams[stream.request_id] = stream
        self._idle.clear()
        return stream

    async def attach(
        self, request_id: RequestId, key_hash: bytes, timeout_s: float
    ) -> AnswerStream | Refused:
        """Take a request over, from another gateway or from nobody; `release` it.

        Whoever reads it now is told that it has moved. Raises: TimeoutError if the scheduler does
        not say in time whether it has the request.
        """
        return await self._attaching.ask(request_id, key_hash, timeout_s)

    def stop(self, stream: AnswerStream, sequence: int) -> None:
        """A stop string was found: this choice needs no more tokens."""
        stream.stopped(sequence)
        cancel = Cancel(stream.request_id, sequence, CancelReason.STOP_STRING)
        if stream.submitted_to is not None and not self._dealer.send(cancel):
            # A whole-request Done follows at `release`, and ends it as well.
            _log.debug("cancel_unsent", request_id=stream.request_id)

    def release(self, stream: AnswerStream, *, keeps: bool = False, is_told: bool = False) -> None:
        """The reader is gone: Done if it got everything, else the request is cancelled.

        If it `keeps`, the request is kept for whoever comes for the rest, or (`is_told`) for the
        last of it in case it was lost on the way.
        """
        reader = self._streams.get(stream.request_id)
        if reader is stream:
            del self._streams[stream.request_id]
        elif reader is not None:
            return  # somebody else reads it here by now
        if not self._streams:
            self._idle.set()
        if stream.submitted_to is None or (stream.is_refused and not stream.is_ours_to_cancel):
            return
        if keeps and stream.submit.context:
            self._say_last(Detach(stream.request_id, is_told))
        elif stream.is_complete and not stream.is_refused:
            self._say_last(Done(stream.request_id))
        else:
            self._say_last(gone(stream.request_id))

    def leave(self, why: str) -> None:
        """End every open answer here with an error; streams can go on at other gateways."""
        self.is_leaving = True
        for stream in self._streams.values():
            if not stream.is_over:
                stream.fail(ErrorCode.DRAINING, why)

    def fail_all(self, why: str) -> None:
        """End every open request with an error its client sees."""
        for stream in self._streams.values():
            self.give_up(stream, ErrorCode.UNAVAILABLE, why)

    def give_up(self, stream: AnswerStream, code: ErrorCode, why: str) -> None:
        """End a request with an error, unless it is over; its scheduler need not go on."""
        if not stream.is_over:
            stream.fail(code, why)
            if stream.submitted_to is not None:
                self._say_last(gone(stream.request_id))
                stream.submitted_to = None

    # ------------------------------------------------------------------ running

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    async def run(self) -> None:
        """Receive and beat, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._beat())

    def close(self) -> None:
        """Give the socket back, after what is queued was sent."""
        self._dealer.close()

    async def _receive(self) -> None:
        while True:
            self._handle(await self._dealer.receive())

    async def _beat(self) -> None:
        while True:
            self._say_what_is_due()
            await asyncio.sleep(self._times.beat_s)

    def _say_what_is_due(self) -> None:
        if self._scheduler.is_lost and not all(s.is_over for s in self._streams.values()):
            phase, lost_s = self._scheduler.phase, self._times.lost_s
            _log.error("requests_given_up", phase=phase, after_s=lost_s)
            self.fail_all(f"the server was not ready for {lost_s:g} s ({phase}); try again later")
        # Every time: a scheduler that took us for dead forgot us, and its Welcome resends.
        self._dealer.send(Hello(self.boot))
        self._last_words.beat(self._streams.keys() | self._attaching.request_ids)
        self._attaching.beat()
        self.pins.beat()
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        positions = []
        for stream in self._streams.values():
            if stream.submitted_to is not None and not stream.is_refused:
                positions.append(stream.position)
        self._dealer.send(Heartbeat(self.boot, "", tuple(positions)))

    def _send_submit(self, stream: AnswerStream) -> None:
        welcome = self._scheduler.welcome
        if welcome is not None and self._dealer.send(stream.resubmission()):
            stream.submitted_to = welcome.boot
            stream.submitted_at = time.monotonic()
        else:
            stream.submitted_to = None

    def _say_last(self, word: LastWord) -> None:
        if not self._attaching.keeps_back(word):
            self._last_words.say(word)

    # ------------------------------------------------------------------ what the scheduler says

    def _handle(self, message: SchedulerReply) -> None:
        self._scheduler.heard()
        match message:
            case Tokens():
                self._on_tokens(message)
            case Heartbeat():
                self._on_heartbeat(message)
            case Welcome():
                self._on_welcome(message)
            case Accepted():
                if stream := self._streams.get(message.request_id):
                    stream.accepted(message)
            case Finished():
                self._on_finished(message)
            case Refused():
                self._on_refused(message)
            case Pinned() | Unpinned() | Pins():
                self.pins.heard(message)
            case Attached():
                self._on_attached(message)

    def _on_tokens(self, message: Tokens) -> None:
        for run in message.items:
            stream = self._streams.get(run.request_id)
            if stream is None:
                self._last_words.came_for_nobody(run.request_id)
            elif not stream.arrived(run):
                _GAPS.inc()

    def _on_finished(self, message: Finished) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:
            stream.ended(message)
        elif message.request_id not in self._attaching.request_ids:
            self._say_last(Done(message.request_id))

    def _on_attached(self, message: Attached) -> None:
        before = self._streams.get(message.request_id)
        if message.request_id not in self._attaching.request_ids:
            if before is None:  # who wanted it has left meanwhile
                self._say_last(Detach(message.request_id))
            return
        if before is not None:
            before.refused(moved(message.request_id))
        stream = AnswerStream.taken_over(message, self._scheduler.boot)
        self._streams[message.request_id] = stream
        self._idle.clear()
        self._attaching.answered(message.request_id, stream)
        _ATTACHED.inc()

    def _on_refused(self, message: Refused) -> None:
        if self.pins.refused(message):
            return
        if message.code is ErrorCode.UNKNOWN_STREAM:
            self._attaching.answered(message.request_id, message)
            return
        stream = self._streams.get(message.request_id)
        if stream is None or stream.is_over:
            return
        if message.code is not ErrorCode.UNKNOWN_REQUEST:
            stream.refused(message)
        elif self._is_about_earlier_beats(stream):
            return
        elif stream.times_given_again >= MAX_TIMES_GIVEN_AGAIN:
            stream.fail(
                ErrorCode.UNAVAILABLE,
                f"the scheduler lost this request {MAX_TIMES_GIVEN_AGAIN + 1} times; try again "
                "later",
            )
        else:
            _log.warning("request_given_again", request_id=message.request_id, why=message.message)
            stream.times_given_again += 1
            _RESUMED.inc()
            self._send_submit(stream)

    def _is_about_earlier_beats(self, stream: AnswerStream) -> bool:
        """A new scheduler, or one that slept, also answers beats from before our submission."""
        is_asked = stream.submitted_to == self._scheduler.boot
        since_s = time.monotonic() - stream.submitted_at
        return not is_asked or since_s < 2 * self._times.beat_s

    def _on_heartbeat(self, message: Heartbeat) -> None:
        is_first = self._scheduler.boot is None
        if self._scheduler.beat(message):
            if not is_first:
                _log.warning("scheduler_restarted", open_requests=len(self._streams))
            self._last_words.forget()
            self.pins.restarted()
            self._dealer.send(Hello(self.boot))  # do not wait for the next beat
        else:
            self.pins.went_on()

    def _on_welcome(self, message: Welcome) -> None:
        if not self._scheduler.welcomed(message):
            return
        self.pins.welcomed(message.boot)  # before requests, which are to begin with them
        for stream in self._streams.values():  # what it lacks, or could not be sent before
            if stream.submitted_to != message.boot and not stream.is_over:
                if stream.submitted_to is not None:
                    _RESUMED.inc()
                self._send_submit(stream)
        if not self._scheduler.is_ready:
            self._send_heartbeat()  # the answer says whether its phase is over
