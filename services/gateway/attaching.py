"""Streams that this gateway has asked for and not been given yet."""

import asyncio
from collections.abc import Callable, Set

from services.gateway.answer_stream import AnswerStream
from shared.errors import ErrorCode
from shared.ids import RequestId
from shared.messages import Attach, Refused


class _Asked:
    """Somebody waits for the answer to this."""

    def __init__(self, attach: Attach) -> None:
        self.attach = attach
        self.answer: asyncio.Future[AnswerStream | Refused] = (
            asyncio.get_running_loop().create_future()
        )

    def answered(self, answer: AnswerStream | Refused) -> None:
        """Wake whoever waits, if it still does."""
        if not self.answer.done():
            self.answer.set_result(answer)


class Attaching:
    """Asks by `send` at once and again at each beat; `let_go` takes a stream nobody waits for."""

    def __init__(
        self, send: Callable[[Attach], bool], let_go: Callable[[AnswerStream], None]
    ) -> None:
        self._send = send
        self._let_go = let_go
        self._asked: dict[RequestId, _Asked] = {}

    @property
    def request_ids(self) -> Set[RequestId]:
        """Those that are asked for."""
        return self._asked.keys()

    async def ask(
        self, request_id: RequestId, key_hash: bytes, timeout_s: float
    ) -> AnswerStream | Refused:
        """The stream, or why there is none. Raises: TimeoutError if nobody says so in time."""
        asked = _Asked(Attach(request_id, key_hash))
        if (before := self._asked.get(request_id)) is not None:
            before.answered(moved(request_id))
        self._asked[request_id] = asked
        self._send(asked.attach)
        try:
            async with asyncio.timeout(timeout_s):
                return await asked.answer
        except (asyncio.CancelledError, TimeoutError):
            if asked.answer.done() and not asked.answer.cancelled():
                stream = asked.answer.result()
                if isinstance(stream, AnswerStream):
                    self._let_go(stream)
            raise
        finally:
            if self._asked.get(request_id) is asked:
                del self._asked[request_id]

    def beat(self) -> None:
        """Ask again: the scheduler may not have heard, or be another one by now."""
        for asked in self._asked.values():
            self._send(asked.attach)

    def answered(self, request_id: RequestId, answer: AnswerStream | Refused) -> None:
        """The scheduler's answer."""
        if (asked := self._asked.pop(request_id, None)) is not None:
            asked.answered(answer)


def moved(request_id: RequestId) -> Refused:
    """What whoever reads a stream is told when somebody else takes it over here."""
    return Refused(request_id, ErrorCode.MOVED, "the stream goes on at another connection")
