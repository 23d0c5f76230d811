"""This gateway's pinned prefixes, and its questions about them: the link's half.

What a client pinned is remembered here, so that another scheduler life gets it again, with the same
id and before any request. A question that is not answered is asked again, at most every RESEND_S:
all of them may be. One that lay in a queue while the scheduler was restarted may be answered by a
life that has not got our prefixes yet; such an answer is doubted until the next heartbeat says
whose it is.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from services.gateway import failures
from shared.errors import ErrorCode
from shared.ids import Boot, RequestId
from shared.logs import get_logger
from shared.messages import ListPins, Pin, Pinned, Pins, Refused, Unpin, Unpinned

RESEND_S: Final = 3.0
ANSWER_S: Final = 10.0  # for answers that need no computing

_Question: TypeAlias = Pin | Unpin | ListPins
_Answer: TypeAlias = Pinned | Unpinned | Pins | Refused

_log = get_logger("link")


@dataclass(slots=True)
class _Asked:
    """A question, until its answer is here."""

    question: _Question
    answer: asyncio.Future[_Answer]
    sent_at: float | None = None
    times_sent: int = 0
    doubted: Pins | None = None
    """An answer that lacks prefixes of ours."""


@dataclass(slots=True)
class _Mine:
    """A prefix that a client of ours pinned. `boot`: the scheduler life that has it."""

    pin: Pin
    boot: Boot | None = None
    again_at: float = 0.0
    is_missed: bool = False
    """Whether a scheduler that came back does not take it for now, which was said in the log."""


class GatewayPins:
    """`send` says whether a message left; what did not is sent at a later beat."""

    def __init__(self, send: Callable[[_Question], bool]) -> None:
        self._send = send
        self._boot: Boot | None = None
        self._mine: dict[RequestId, _Mine] = {}
        self._asked: dict[RequestId, _Asked] = {}

    @property
    def num_remembered(self) -> int:
        """Prefixes that the next scheduler life gets again."""
        return len(self._mine)

    # ------------------------------------------------------------------ what routes ask

    async def pin(self, pin: Pin, timeout_s: float) -> Pinned | None:
        """Pin a prefix. Returns: what is known of it, None if it is still computed then.

        Whoever stops waiting leaves it pinned. Raises: Failure if it is refused.
        """
        self._mine[pin.pin_id] = _Mine(pin)
        try:
            answer = await self._ask(pin.pin_id, pin, timeout_s)
        except TimeoutError:
            return None
        if isinstance(answer, Refused):
            raise failures.of_refusal(answer)
        if isinstance(answer, Unpinned):
            raise failures.unknown_prefix(pin.pin_id)
        return answer if isinstance(answer, Pinned) else None

    async def unpin(self, pin_id: RequestId, key_hash: bytes) -> None:
        """Let a prefix go. Raises: Failure 404 if it is not here, 503 if nobody answers."""
        mine = self._mine.get(pin_id)
        is_ours = mine is not None and mine.pin.key_hash == key_hash
        is_gone = await self._unpinned(pin_id, key_hash)
        if not is_ours and not is_gone:
            raise failures.unknown_prefix(pin_id)
        if not is_gone:  # said by a life that had not got it yet, or would not have it
            listed = await self.list(key_hash)
            if any(item.pin_id == pin_id for item in listed):
                await self._unpinned(pin_id, key_hash)
        if is_ours:
            self._mine.pop(pin_id, None)

    async def _unpinned(self, pin_id: RequestId, key_hash: bytes) -> bool:
        """Ask for it; False if there is no such prefix. Raises: Failure 503 if nobody answers."""
        key = RequestId(f"unpin {pin_id} {secrets.token_hex(8)}")
        try:
            answer = await self._ask(key, Unpin(pin_id, key_hash), ANSWER_S)
        except TimeoutError:
            raise _no_answer() from None
        return not isinstance(answer, Refused)

    async def list(self, key_hash: bytes) -> tuple[Pinned, ...]:
        """The prefixes of a key. Raises: Failure 503 if nobody answers."""
        query_id = RequestId(f"pins-{secrets.token_hex(16)}")
        try:
            answer = await self._ask(query_id, ListPins(query_id, key_hash), ANSWER_S)
        except TimeoutError:
            raise _no_answer() from None
        return answer.items if isinstance(answer, Pins) else ()

    async def _ask(self, key: RequestId, question: _Question, timeout_s: float) -> _Answer:
        asked = _Asked(question, asyncio.get_running_loop().create_future())
        self._asked[key] = asked
        try:
            self._say(asked)
            async with asyncio.timeout(timeout_s):
                return await asked.answer
        finally:
            del self._asked[key]

    # ------------------------------------------------------------------ what the link does

    def beat(self) -> None:
        """Time passes: what is not answered yet is asked again."""
        now = time.monotonic()
        if self._boot is None:
            return
        for asked in self._asked.values():
            if asked.sent_at is None or now - asked.sent_at >= RESEND_S:
                self._say(asked)
        for mine in self._mine.values():
            if mine.boot != self._boot and now >= mine.again_at:
                self._give_again(mine)

    def welcomed(self, boot: Boot) -> None:
        """A scheduler serves our model; one that is new gets all prefixes."""
        if boot == self._boot:
            return
        self._boot = boot
        for mine in self._mine.values():
            self._give_again(mine)
        for asked in self._asked.values():
            if not isinstance(asked.question, Pin):
                self._say(asked)

    def restarted(self) -> None:
        """The scheduler is another one, and does not know our model yet."""
        self._boot = None
        for asked in self._asked.values():
            asked.doubted = None

    def went_on(self) -> None:
        """The scheduler is the one it was: what it said of prefixes is true."""
        for key, asked in self._asked.items():
            if asked.doubted is not None:
                self._answer(key, asked.doubted)

    def heard(self, message: Pinned | Unpinned | Pins) -> None:
        """An answer, or news of a prefix of ours."""
        match message:
            case Pins():
                self._listed(message)
            case Pinned(pin_id):
                if message.is_ready:
                    self._found(pin_id)
                    self._answer(pin_id, message)
            case Unpinned(pin_id):
                self._mine.pop(pin_id, None)
                self._answer(pin_id, message)
                self._answer_unpins(pin_id, message)

    def refused(self, message: Refused) -> bool:
        """Whether this refusal is of a prefix."""
        pin_id = message.request_id
        if message.code is ErrorCode.UNKNOWN_PREFIX:
            self._answer_unpins(pin_id, message)
            return True
        mine = self._mine.get(pin_id)
        if mine is None:
            return False
        if pin_id not in self._asked and message.retry_after_s is not None:
            mine.boot, mine.again_at = None, time.monotonic() + message.retry_after_s
            if not mine.is_missed:
                mine.is_missed = True
                _log.warning("prefix_missed", id=pin_id, why=message.message)
            return True
        del self._mine[pin_id]
        _log.warning("prefix_not_pinned", id=pin_id, why=message.message)
        self._answer(pin_id, message)
        return True

    def _found(self, pin_id: RequestId) -> None:
        mine = self._mine.get(pin_id)
        if mine is not None and mine.is_missed:
            mine.is_missed = False
            _log.info("prefix_pinned_again", id=pin_id)

    def _listed(self, message: Pins) -> None:
        key, _, boot = message.query_id.rpartition("@")
        asked = self._asked.get(RequestId(key))
        if boot != str(self._boot) or asked is None or not isinstance(asked.question, ListPins):
            return
        ours = [mine.pin for mine in self._mine.values() if mine.boot == self._boot]
        there = {item.pin_id for item in message.items}
        if all(pin.pin_id in there for pin in ours if pin.key_hash == asked.question.key_hash):
            self._answer(RequestId(key), message)
        else:
            asked.doubted = message

    def _answer(self, key: RequestId, message: _Answer) -> None:
        asked = self._asked.get(key)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(message)

    def _answer_unpins(self, pin_id: RequestId, message: Unpinned | Refused) -> None:
        for asked in self._asked.values():
            if isinstance(asked.question, Unpin) and asked.question.pin_id == pin_id:
                is_repeat = isinstance(message, Refused) and asked.times_sent > 1
                if not asked.answer.done():  # asked twice, it may have been the first that did it
                    asked.answer.set_result(Unpinned(pin_id) if is_repeat else message)

    def _give_again(self, mine: _Mine) -> None:
        if self._send(mine.pin):
            mine.boot = self._boot

    def _say(self, asked: _Asked) -> None:
        question = asked.question
        if isinstance(question, ListPins):  # the answer tells to which life it was sent
            question = replace(question, query_id=RequestId(f"{question.query_id}@{self._boot}"))
        if self._boot is not None and self._send(question):
            asked.sent_at = time.monotonic()
            asked.times_sent += 1
            asked.doubted = None
            if isinstance(question, Pin) and question.pin_id in self._mine:
                self._mine[question.pin_id].boot = self._boot


def _no_answer() -> failures.Failure:
    return failures.unavailable("the scheduler did not answer in time; try again")
