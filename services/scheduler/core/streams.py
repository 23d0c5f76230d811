"""What gateways are told, and how what was lost on the way reaches them after all.

Every sequence's tokens are kept until its gateway says `Done`. A message that is lost is never
noticed here; the gateway's heartbeats show it. A stream is *stalled* when two heartbeats in a row
show it at the same position although there was more to be had at the first of them already; then
`Accepted` and all after that position are sent again. Tokens that are merely on their way cost at
most a repeat, which `TokenRun.start` shows for what it is.
"""

from dataclasses import replace
from typing import Final

from services.scheduler.core.commands import Reply
from services.scheduler.core.counters import Counters
from services.scheduler.core.events import Gateway
from services.scheduler.core.request import Listed, Request
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.wire_size import run_bytes
from shared.errors import InvariantBroken
from shared.ids import Ids
from shared.messages import (
    Accepted,
    Attached,
    AttachedSequence,
    Finished,
    SchedulerReply,
    TokenRun,
    Tokens,
)

LONG_BYTES: Final = 16 * 2**20


class Outbox:
    """Replies of one event, in order; runs of tokens for one gateway share a message.

    But for long runs: a message ends where they come to LONG_BYTES. One that is longer is alone.
    """

    def __init__(self) -> None:
        self._runs: dict[Gateway, list[TokenRun]] = {}
        self._num_bytes: dict[Gateway, int] = {}
        """Of these, as far as they may be long."""
        self._replies: list[Reply] = []

    def add_long_run(self, gateway: Gateway | None, run: TokenRun) -> None:
        """Tokens, any number of them; whoever is None hears nothing, of this or of the rest."""
        if gateway is None:
            return
        size = run_bytes(run)
        before = self._num_bytes.get(gateway, 0)
        if before + size > LONG_BYTES and gateway in self._runs:
            self._close(gateway)
            before = 0
        self.add_run(gateway, run)
        self._num_bytes[gateway] = before + size
        if size > LONG_BYTES:
            self._close(gateway)

    def add_run(self, gateway: Gateway | None, run: TokenRun) -> None:
        """A token; they leave before whatever is said next."""
        if gateway is None:
            return
        runs = self._runs.get(gateway)
        if runs is None:
            self._runs[gateway] = [run]
        else:
            runs.append(run)

    def say(self, gateway: Gateway | None, message: SchedulerReply) -> None:
        """Any other message; all tokens added before come first."""
        if gateway is None:
            return
        self._close_runs()
        self._replies.append(Reply(gateway, message))

    def drain(self) -> list[Reply]:
        """Everything, once."""
        self._close_runs()
        replies, self._replies = self._replies, []
        return replies

    def _close_runs(self) -> None:
        for gateway, runs in self._runs.items():
            self._replies.append(Reply(gateway, Tokens(tuple(runs))))
        self._runs.clear()
        self._num_bytes.clear()

    def _close(self, gateway: Gateway) -> None:
        self._replies.append(Reply(gateway, Tokens(tuple(self._runs.pop(gateway)))))
        self._num_bytes.pop(gateway, None)


class Streams:
    """Tells each request's gateway what happens to it."""

    def __init__(self, outbox: Outbox, counters: Counters) -> None:
        self._outbox = outbox
        self._counters = counters

    def accepted(self, request: Request) -> None:
        """The request waits or runs."""
        self._outbox.say(request.reader, Accepted(request.request_id, request.max_tokens))

    def grew(self, request: Request, sequence: Sequence) -> None:
        """The sequence has one token more."""
        start = len(sequence.generated) - 1
        if not start:
            self._send_run(request, sequence, 0)
            return
        logprobs = (sequence.logprobs[-1],) if sequence.logprobs else ()
        last = (sequence.generated[-1],)
        run = TokenRun(request.submit.request_id, sequence.index, start, last, logprobs)
        self._outbox.add_run(request.reader, run)

    def grew_whole(self, request: Request, sequence: Sequence) -> None:
        """The sequence has all its tokens at once: it is the answer of a beam search."""
        self._send_run(request, sequence, 0)

    def scored(self, request: Request) -> None:
        """All of the prompt is scored. Where nothing is drawn, that is all there is to be told."""
        if request.max_tokens == 0:
            self._send_run(request, request.sequences[0], 0)

    def ended(self, request: Request, sequence: Sequence) -> None:
        """The sequence has ended. Raises: InvariantBroken if it has not."""
        if sequence.finish is None:
            raise InvariantBroken(f"{request.request_id}:{sequence.index} has not ended")
        self._outbox.say(
            request.reader,
            Finished(
                request.request_id,
                sequence.index,
                sequence.finish.reason,
                length=len(sequence.generated),
                usage=request.usage(),
                stop_token_id=sequence.finish.stop_token_id,
                error=sequence.finish.error,
                code=sequence.finish.code,
            ),
        )

    def attached(self, request: Request, at: float) -> None:
        """Its new gateway gets all there is."""
        self._outbox.say(
            request.reader,
            Attached(
                replace(
                    request.submit,
                    generated=(),
                    prompt_logprobs=(),
                    age_s=at - request.arrival,
                    resubmitted=True,
                ),
                sequences=tuple(
                    AttachedSequence(
                        tuple(sequence.generated),
                        tuple(sequence.logprobs),
                        finish=sequence.finish.reason if sequence.finish else None,
                        stop_token_id=sequence.finish.stop_token_id if sequence.finish else None,
                    )
                    for sequence in request.sequences
                ),
                cached_tokens=request.usage().cached_tokens,
                prompt_logprobs=request.scores,
            ),
        )
        self.accepted(request)
        self.bring_up_to_date(
            request, tuple(len(sequence.generated) for sequence in request.sequences)
        )

    def moved(self, request: Request, gateway: Gateway, at: float) -> None:
        """From now on this gateway is told; whoever was told before is no longer heard."""
        request.gateway = gateway
        request.detached_at = None
        request.kept_bytes = 0
        request.last_heard = at
        request.listed = ()

    def bring_up_to_date(self, request: Request, positions: Ids) -> None:
        """Send what a gateway that holds `positions` tokens of each sequence misses."""
        for sequence in request.sequences:
            self._send_run(request, sequence, _position(positions, sequence))
        for sequence in request.sequences:
            if sequence.finish is not None:
                self.ended(request, sequence)

    def listed(self, request: Request, positions: Ids, at: float) -> None:
        """Its gateway's heartbeat names it; what it misses is sent again if it is stalled."""
        before = request.listed
        request.detached_at = None  # its gateway was taken for lost
        request.last_heard = at
        request.listed = tuple(
            Listed(
                _position(positions, sequence),
                len(sequence.generated),
                sequence.finish is not None,
            )
            for sequence in request.sequences
        )
        stalled = [
            sequence
            for sequence, then, now in zip(request.sequences, before, request.listed, strict=False)
            if now.position == then.position
            and (then.num_generated > then.position or then.is_finished)
        ]
        if stalled:
            self.accepted(request)
        self._counters.resent_runs += len(stalled)
        for sequence in stalled:
            self._send_run(request, sequence, _position(positions, sequence))
        for sequence in stalled:
            if sequence.finish is not None:
                self.ended(request, sequence)

    def _send_run(self, request: Request, sequence: Sequence, start: int) -> None:
        """All from `start` on. A prompt's scores go with the first token, or else alone."""
        scores = request.scores if start == 0 and sequence.index == 0 else ()
        if start < len(sequence.generated) or (scores and request.max_tokens == 0):
            run = TokenRun(
                request.request_id,
                sequence.index,
                start,
                tuple(sequence.generated[start:]),
                tuple(sequence.logprobs[start:]),
                scores,
            )
            self._outbox.add_long_run(request.reader, run)


def _position(positions: Ids, sequence: Sequence) -> int:
    """What a gateway says it holds of a sequence; 0 if it says nothing of it."""
    return max(0, positions[sequence.index]) if sequence.index < len(positions) else 0
