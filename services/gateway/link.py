"""The gateway's end of the request link: every open request's tokens, through losses.

Nothing here waits for a socket: what could not be sent is kept and sent at the next beat. Beats
list the open streams, so the scheduler can send again what was lost; a new scheduler boot gets
every open request again, with the tokens that are here.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter

from services.gateway.answer_stream import AnswerStream
from shared.errors import ErrorCode
from shared.ids import Boot, RequestId
from shared.links import Dealer
from shared.liveness import SILENCE_S, new_boot
from shared.logs import get_logger
from shared.messages import (
    TO_GATEWAY,
    Accepted,
    Attached,
    Cancel,
    CancelReason,
    Done,
    Finished,
    Heartbeat,
    Hello,
    Refused,
    SchedulerReply,
    Submit,
    Tokens,
    Welcome,
)
from shared.metrics import PREFIX, REGISTRY

_GAPS: Final = Counter(
    PREFIX + "token_gaps",
    "Runs of tokens that came before earlier ones of the same stream, mended by a heartbeat",
    registry=REGISTRY,
)
_RESUMED: Final = Counter(
    PREFIX + "streams_resumed",
    "Requests given again to a scheduler that had lost them",
    registry=REGISTRY,
)

MAX_TIMES_GIVEN_AGAIN: Final = 3  # without a token in between; then a refusal is believed

_log = get_logger("link")


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds: between beats, of silence until not ready, of that until open requests end."""

    beat_s: float = 1.0
    silent_s: float = SILENCE_S
    lost_s: float = 60.0


class SchedulerLink:
    """One gateway life's connection to the scheduler.

    Ready = a scheduler with our model said Welcome and was heard in the last `silent_s`.
    """

    def __init__(
        self, endpoint: str, model: str, vocab_size: int, times: LinkTimes | None = None
    ) -> None:
        self.boot = new_boot()
        self._model = model
        self._vocab_size = vocab_size
        self._times = times or LinkTimes()
        self._dealer: Dealer[SchedulerReply] = Dealer(
            "request",
            endpoint,
            TO_GATEWAY,
            identity=b"g" + self.boot.to_bytes(8, "little"),
            flag="--request-endpoint",
        )
        self._welcome: Welcome | None = None
        self._scheduler_boot: Boot | None = None
        self._scheduler_phase = ""
        self._mismatch = ""
        self._heard_at = self._ready_at = time.monotonic()
        self._streams: dict[RequestId, AnswerStream] = {}
        self._unsent: dict[RequestId, Cancel | Done] = {}
        self._orphans: set[RequestId] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------ state

    @property
    def welcome(self) -> Welcome | None:
        """What the scheduler said of the model it serves, once it has (and it is ours)."""
        return self._welcome

    @property
    def is_ready(self) -> bool:
        """Requests are taken."""
        return self._welcome is not None and not self._is_silent

    @property
    def phase(self) -> str:
        """What is missing until ready; "" when nothing is."""
        if self.is_ready:
            return ""
        if self._scheduler_boot is None or self._is_silent:
            return "waiting for the scheduler"
        return self._mismatch or self._scheduler_phase or "waiting for the scheduler's welcome"

    @property
    def num_open(self) -> int:
        """Requests that have a reader."""
        return len(self._streams)

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._times.silent_s

    # ------------------------------------------------------------------ requests

    def submit(self, submit: Submit) -> AnswerStream:
        """Send a request; its tokens arrive at the stream. `release` it, whatever happens.

        Raises: WireError if it has no wire form (far too long).
        """
        stream = AnswerStream(submit)
        self._send_submit(stream)
        self._streams[stream.request_id] = stream
        self._idle.clear()
        return stream

    def stop(self, stream: AnswerStream, sequence: int) -> None:
        """A stop string was found: this choice needs no more tokens."""
        stream.stopped(sequence)
        cancel = Cancel(stream.request_id, sequence, CancelReason.STOP_STRING)
        if stream.submitted_to is not None and not self._dealer.send(cancel):
            # A whole-request Done follows at `release`, and ends it as well.
            _log.debug("cancel_unsent", request_id=stream.request_id)

    def release(self, stream: AnswerStream) -> None:
        """The reader is gone: Done if it got everything, else the request is cancelled."""
        self._streams.pop(stream.request_id, None)
        if not self._streams:
            self._idle.set()
        if stream.submitted_to is None or stream.is_refused:
            return
        if stream.is_complete:
            self._send_last(Done(stream.request_id))
        else:
            self._send_last(Cancel(stream.request_id, None, CancelReason.CLIENT_GONE))

    def fail_all(self, why: str) -> None:
        """End every open request with an error its client sees."""
        for stream in self._streams.values():
            if not stream.is_complete:
                stream.fail(ErrorCode.UNAVAILABLE, why)

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
        if self.is_ready:
            self._ready_at = time.monotonic()
        elif self._streams and time.monotonic() - self._ready_at > self._times.lost_s:
            _log.error("scheduler_lost", open_requests=len(self._streams), phase=self.phase)
            self.fail_all(f"the server lost its scheduler ({self.phase}); try again later")
        # Every time: a scheduler that took us for dead forgot us, and its Welcome resends.
        self._dealer.send(Hello(self.boot))
        positions = []
        for stream in self._streams.values():
            if stream.submitted_to is not None and not stream.is_refused:
                positions.append(stream.position)
        for request_id in self._orphans - self._streams.keys():
            self._unsent.setdefault(request_id, Cancel(request_id, None, CancelReason.CLIENT_GONE))
        self._orphans.clear()
        for request_id, message in list(self._unsent.items()):
            if self._dealer.send(message):
                del self._unsent[request_id]
        self._dealer.send(Heartbeat(self.boot, "", tuple(positions)))

    def _send_submit(self, stream: AnswerStream) -> None:
        welcome = self._welcome
        if welcome is not None and self._dealer.send(stream.resubmission()):
            stream.submitted_to = welcome.boot
            stream.submitted_at = time.monotonic()
            stream.num_submissions += 1
        else:
            stream.submitted_to = None

    def _send_last(self, message: Cancel | Done) -> None:
        if not self._dealer.send(message):
            self._unsent[message.request_id] = message

    # ------------------------------------------------------------------ what the scheduler says

    def _handle(self, message: SchedulerReply) -> None:
        self._heard_at = time.monotonic()
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
            case Attached():
                _log.warning("unexpected_message", message="Attached")  # we never ask

    def _on_tokens(self, message: Tokens) -> None:
        for run in message.items:
            stream = self._streams.get(run.request_id)
            if stream is None:
                self._orphans.add(run.request_id)
            elif not stream.arrived(run):
                _GAPS.inc()

    def _on_finished(self, message: Finished) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            self._send_last(Done(message.request_id))
        else:
            stream.ended(message)

    def _on_refused(self, message: Refused) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if message.code is not ErrorCode.UNAVAILABLE or self._is_first_answer(stream):
            stream.refused(message)
        elif self._is_about_earlier_beats(stream):
            return
        elif stream.times_given_again >= MAX_TIMES_GIVEN_AGAIN:
            stream.refused(message)
        else:
            # It was taken once and is not known any more: give it again.
            _log.warning("request_given_again", request_id=message.request_id, why=message.message)
            stream.times_given_again += 1
            _RESUMED.inc()
            self._send_submit(stream)

    def _is_first_answer(self, stream: AnswerStream) -> bool:
        """The scheduler that was asked says no; it is not one that lost the request."""
        is_asked = stream.submitted_to == self._scheduler_boot
        return is_asked and stream.num_submissions == 1 and not stream.is_accepted

    def _is_about_earlier_beats(self, stream: AnswerStream) -> bool:
        """A new scheduler, or one that slept, also answers beats from before our submission."""
        is_asked = stream.submitted_to == self._scheduler_boot
        since_s = time.monotonic() - stream.submitted_at
        return not is_asked or since_s < 2 * self._times.beat_s

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._scheduler_phase = message.phase
        if message.boot != self._scheduler_boot:
            if self._scheduler_boot is not None:
                _log.warning("scheduler_restarted", open_requests=len(self._streams))
            self._scheduler_boot = message.boot
            self._welcome = None
            self._unsent.clear()  # about requests that this scheduler never heard of
            self._orphans.clear()
            self._dealer.send(Hello(self.boot))  # do not wait for the next beat

    def _on_welcome(self, message: Welcome) -> None:
        self._scheduler_boot = message.boot
        mismatch = self._compare(message)
        if mismatch and mismatch != self._mismatch:
            _log.error("model_mismatch", why=mismatch)
        self._mismatch = mismatch
        if mismatch:
            self._welcome = None
            return
        if self._welcome is None:
            _log.info("ready", model=message.model, max_model_len_tokens=message.max_model_len)
        self._welcome = message
        self._ready_at = time.monotonic()
        for stream in self._streams.values():  # what it lacks, or could not be sent before
            if stream.submitted_to != message.boot and not stream.is_complete:
                if stream.submitted_to is not None:
                    _RESUMED.inc()
                self._send_submit(stream)

    def _compare(self, welcome: Welcome) -> str:
        if welcome.model != self._model:
            return (
                f"the gateway was started with --model {self._model}, the executor with "
                f"{welcome.model}: start both with the same"
            )
        if welcome.shape.vocab_size < self._vocab_size:
            return (
                f"the gateway's tokenizer has {self._vocab_size} tokens, the executor's model "
                f"only {welcome.shape.vocab_size}: start both with the same --model"
            )
        return ""
