"""A scheduler that does what a test says, over a real socket and the real messages.

By default it answers every request with the next of `script` (or "ok"). With `holds` it takes
requests and leaves the rest to the test: `run`, `finish`, and of prefixes `pinned`. With `answer`
it generates that text slowly (some tokens a heartbeat), and loses messages as `dice` say.
Log-probabilities, where a request asks for them, are `places_of` token and position.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shared.errors import ErrorCode
from shared.geometry import ModelShape
from shared.ids import Boot, RequestId
from shared.links import Router
from shared.liveness import new_boot
from shared.messages import (
    TO_SCHEDULER,
    Accepted,
    Activity,
    Attach,
    Attached,
    AttachedSequence,
    Cancel,
    CancelReason,
    Detach,
    Done,
    Finished,
    GatewayMessage,
    Heartbeat,
    Hello,
    KVBill,
    ListPins,
    Pin,
    Pinned,
    Pins,
    PositionLogprobs,
    Refused,
    Submit,
    TokenRun,
    Tokens,
    Unpin,
    Unpinned,
    Usage,
    Welcome,
)
from shared.sampling import FinishReason

TOY_SHAPE = ModelShape(
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    hidden_size=1,
    vocab_size=512,
    max_position_embeddings=8192,
)
EOS = 256
T = TypeVar("T")


@dataclass
class Script:
    """One answer: runs of tokens (text is its bytes), each its own message, and how it ends."""

    runs: Sequence[bytes | str | Sequence[int]] = ("ok",)
    reason: FinishReason = FinishReason.LENGTH
    stop_token_id: int | None = None
    error: str | None = None
    code: ErrorCode | None = None
    refusal: Refused | None = None


def ids_of(run: bytes | str | Sequence[int]) -> tuple[int, ...]:
    return tuple(run.encode() if isinstance(run, str) else run)


def places_of(token_id: int, position: int, num_top: int) -> PositionLogprobs:
    """The same for everybody who asks; every 13th token was impossible."""
    top_ids = tuple([(token_id + 7 * rank + position) % 256 for rank in range(num_top)])
    top = tuple([-0.5 - 0.25 * rank for rank in range(num_top)])
    chosen = -math.inf if token_id % 13 == 0 else -0.125 * (token_id % 50)
    rank = 1 + token_id % 50
    if token_id in top_ids:
        rank = top_ids.index(token_id) + 1
        chosen = top[rank - 1]
    return PositionLogprobs(chosen, rank, top_ids, top)


@dataclass
class _Log:
    """All tokens of one sequence of a request, and its end."""

    submit: Submit
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None

    def run(self, start: int) -> TokenRun:
        """All from `start` on, with the log-probabilities that were asked for."""
        submit, sampling = self.submit, self.submit.sampling
        token_ids = tuple(self.token_ids[start:])
        logprobs: list[PositionLogprobs] = []
        if (num_top := sampling.logprobs) is not None:
            first = len(submit.prompt) + start
            logprobs = [places_of(x, first + i, num_top) for i, x in enumerate(token_ids)]
        of_prompt: list[PositionLogprobs] = []
        if (num_top := sampling.prompt_logprobs) is not None and start == 0 and not self.index:
            of_prompt = [places_of(x, i, num_top) for i, x in enumerate(submit.prompt) if i]
        return TokenRun(
            submit.request_id, self.index, start, token_ids, tuple(logprobs), tuple(of_prompt)
        )

    @property
    def owes_prompt(self) -> bool:
        """Nothing is to be generated, and still there is something to be told."""
        wants = self.submit.sampling.prompt_logprobs is not None
        return wants and not self.index and not self.token_ids


class ScriptedScheduler:
    def __init__(
        self,
        endpoint: str,
        *,
        model: str = "toy",
        max_model_len: int = 8192,
        vocab: int = 512,
        boot: Boot | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.boot = boot or new_boot()
        self.model = model
        self.max_model_len = max_model_len
        self.shape = ModelShape(1, 1, 1, 1, 1, vocab, 8192)
        self.eos = EOS
        self.phase = ""
        self.activity = Activity.IDLE
        self.welcomes = True
        self.beats = True
        self.holds = False
        self.is_mute = False
        self.script: deque[Script] = deque()
        self.received: list[GatewayMessage] = []
        self.logs: dict[RequestId, list[_Log]] = {}
        self.detached: dict[RequestId, bool] = {}
        """Requests without a reader, and whether their clients were told all."""
        self.pins: dict[RequestId, Pin] = {}
        self.pin_refusal: Refused | None = None
        self.cached_tokens = 0
        self.bill: KVBill | None = None
        self.answer: Callable[[Submit], bytes] | None = None
        self.dice: random.Random | None = None
        self._changed = asyncio.Condition()
        self._router: Router[GatewayMessage] = Router("test", endpoint, TO_SCHEDULER)
        self._peer = b""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._router.close()

    # ------------------------------------------------------------------ what a test does

    async def until(self, happened: Callable[[], bool], timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(happened)

    async def until_next(self, timeout_s: float = 10) -> None:
        """Until one more message has come."""
        count = len(self.received)
        await self.until(lambda: len(self.received) > count, timeout_s)

    async def submitted(self, count: int = 1) -> Submit:
        """The `count`-th request of this scheduler's life."""
        await self.until(lambda: len(self.of(Submit)) >= count)
        return self.of(Submit)[count - 1]

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.received if isinstance(message, kind)]

    def cancels(self, reason: CancelReason) -> list[RequestId]:
        return [cancel.request_id for cancel in self.of(Cancel) if cancel.reason is reason]

    def send(self, message: object) -> None:
        assert self._router.send(self._peer, message)

    def run(
        self,
        request_id: RequestId,
        run: bytes | str | Sequence[int],
        index: int = 0,
        *,
        lost: bool = False,
    ) -> None:
        """Generate these tokens; `lost` ones are logged and never sent."""
        log = self.logs[request_id][index]
        start = len(log.token_ids)
        log.token_ids += ids_of(run)
        if not lost:
            self.send(Tokens((log.run(start),)))

    def finish(
        self,
        request_id: RequestId,
        reason: FinishReason = FinishReason.LENGTH,
        index: int = 0,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        code: ErrorCode | None = None,
        lost: bool = False,
    ) -> None:
        log = self.logs[request_id][index]
        length = len(log.token_ids)
        usage = Usage(len(log.submit.prompt), length, self.cached_tokens, self.bill)
        log.finished = Finished(
            request_id, index, reason, length, usage, stop_token_id, error, code
        )
        if not lost:
            self.send(log.finished)

    def begin_again(self) -> None:
        """Another life, of which nobody hears until `is_heard_of`; what is asked reaches it."""
        self.boot = new_boot()
        self.pins.clear()
        self.logs.clear()
        self.welcomes = self.beats = False

    def is_heard_of(self) -> None:
        """Heartbeats and hellos are answered from now on."""
        self.welcomes = self.beats = True

    # ------------------------------------------------------------------ what it does by itself

    async def _run(self) -> None:
        while True:
            self._peer, message = await self._router.receive()
            async with self._changed:
                self.received.append(message)
                if not self.is_mute:
                    self._handle(message)
                self._changed.notify_all()
            await asyncio.sleep(0)  # the gateway, in the same loop, reads what was sent

    def _handle(self, message: GatewayMessage) -> None:
        match message:
            case Hello() if self.welcomes:
                self.send(
                    Welcome(self.boot, self.model, self.shape, 16, self.max_model_len, (self.eos,))
                )
            case Heartbeat() if self.beats:
                self.send(Heartbeat(self.boot, self.phase, (), self.activity))
                self._mend(message)
            case Submit():
                self.take(message)
            case Cancel(reason=CancelReason.STOP_STRING):
                self.finish(message.request_id, FinishReason.STOP, message.sequence or 0)
            case Attach():
                self._give(message)
            case Detach():
                self.detached[message.request_id] = message.is_told
            case Cancel() | Done() if message.request_id not in self.detached:
                self.logs.pop(message.request_id, None)
            case Pin() if self.pin_refusal is not None:
                self.send(replace(self.pin_refusal, request_id=message.pin_id))
            case Pin():
                self.pins[message.pin_id] = message
                if not self.holds:
                    self.send(self.pinned(message.pin_id))
            case Unpin(pin_id):
                known = self.pins.pop(pin_id, None)
                code = ErrorCode.UNKNOWN_PREFIX
                self.send(Unpinned(pin_id) if known else Refused(pin_id, code, "no such prefix"))
            case ListPins(query_id, key_hash):
                items = [self.pinned(pin.pin_id) for pin in self.pins.values()
                         if pin.key_hash == key_hash]  # fmt: skip
                self.send(Pins(query_id, tuple(items)))

    def _give(self, attach: Attach) -> None:
        """All of a request to whoever asks for it with its key."""
        request_id, logs = attach.request_id, self.logs.get(attach.request_id)
        if logs is None or logs[0].submit.key_hash != attach.key_hash:
            self.send(Refused(request_id, ErrorCode.UNKNOWN_STREAM, "no such stream: 300 s"))
            return
        self.detached.pop(request_id, None)
        submit, runs = logs[0].submit, [log.run(0) for log in logs]
        sequences = tuple(AttachedSequence(run.token_ids, run.logprobs) for run in runs)
        self.send(
            Attached(
                replace(submit, generated=(), prompt_logprobs=(), resubmitted=True),
                sequences,
                prompt_logprobs=runs[0].prompt_logprobs if runs[0].token_ids else (),
            )
        )
        for log in logs:
            if log.finished is not None:
                self.send(log.finished)

    def pinned(self, pin_id: RequestId, num_hits: int = 0) -> Pinned:
        """What is said of a prefix: it is ready, unless this scheduler holds."""
        pin = self.pins[pin_id]
        num_tokens = len(pin.token_ids)
        return Pinned(
            pin_id, num_tokens, -(-num_tokens // 16), not self.holds, num_hits, pin.context
        )

    def take(self, submit: Submit) -> None:
        """Answer a request as the script says."""
        script = self.script.popleft() if self.script else Script()
        if script.refusal is not None:
            refusal = script.refusal
            self.send(
                Refused(
                    submit.request_id,
                    refusal.code,
                    refusal.message,
                    refusal.param,
                    refusal.retry_after_s,
                )
            )
            return
        logs = self.logs[submit.request_id] = [
            _Log(submit, index) for index in range(submit.sampling.n)
        ]
        for log, generated in zip(logs, submit.generated, strict=bool(submit.generated)):
            log.token_ids += generated.token_ids
        self.send(Accepted(submit.request_id, submit.sampling.max_tokens or 100))
        for log in logs:
            if self.answer is not None:
                self._go_on(log)
            elif not self.holds:
                self._tell(log, script)

    def _tell(self, log: _Log, script: Script) -> None:
        """All of an answer; of several, each but the first begins with its number."""
        request_id = log.submit.request_id
        runs = [str(log.index), *script.runs] if log.index else script.runs
        for run in runs or ([()] if log.owes_prompt else ()):
            self.run(request_id, run, log.index)
        self.finish(
            request_id,
            script.reason,
            log.index,
            stop_token_id=script.stop_token_id,
            error=script.error,
            code=script.code,
        )

    def _mend(self, heartbeat: Heartbeat) -> None:
        for stream in heartbeat.streams:
            logs = self.logs.get(stream.request_id)
            if logs is None:
                no = Refused(stream.request_id, ErrorCode.UNKNOWN_REQUEST, "unknown request")
                self.send(no)
                continue
            for log, have in zip(logs, stream.positions, strict=True):
                self._go_on(log)
                if have < len(log.token_ids) or (log.finished is not None and log.owes_prompt):
                    self._maybe(Tokens((log.run(have),)))
                if log.finished is not None:
                    self._maybe(log.finished)

    def _go_on(self, log: _Log) -> None:
        """Generate a few tokens more of the answer, some of them lost on the way."""
        if self.answer is None or log.finished is not None:
            return
        answer, request_id = self.answer(log.submit), log.submit.request_id
        answer = str(log.index).encode() * (log.index > 0) + answer
        for _ in range(4):
            start = len(log.token_ids)
            log.token_ids += answer[start : start + 5]
            self._maybe(Tokens((log.run(start),)))
        if len(log.token_ids) == len(answer):
            self.finish(request_id, index=log.index, lost=True)

    def _maybe(self, message: object) -> None:
        if self.dice is None or self.dice.random() < 0.6:
            self._router.send(self._peer, message)  # what finds no room is lost, too
