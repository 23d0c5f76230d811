"""Streams that this gateway has asked for and not been given yet."""

import asyncio
from collections.abc import Callable, Set

from services.gateway.answer_stream import AnswerStream
from services.gateway.last_words import LastWord, LastWords
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
        self.word: LastWord | None = None
        """Of the reader before, who left meanwhile; for the case that nothing comes of this."""

    def answered(self, answer: AnswerStream | Refused) -> None:
        """Wake whoever waits, if it still does."""
        if not self.answer.done():
            self.answer.set_result(answer)


class Attaching:
    """Asks by `send` at once and again at each beat; `let_go` takes a stream nobody waits for.

    Whatever this gateway says last of a request, the scheduler takes for said of its reader at that
    time. So what waits in `last_words` is said before the request is asked for, and what its reader
    here has to say while it is asked for is kept back.
    """

    def __init__(
        self,
        send: Callable[[Attach], bool],
        let_go: Callable[[AnswerStream], None],
        last_words: LastWords,
    ) -> None:
        self._send = send
        self._let_go = let_go
        self._last_words = last_words
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
            asked.word = before.word
            before.answered(moved(request_id))
        self._asked[request_id] = asked
        self._ask(asked)
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
                self._end(request_id)

    def beat(self) -> None:
        """Ask again: the scheduler may not have heard, or be another one by now."""
        for asked in self._asked.values():
            self._ask(asked)

    def answered(self, request_id: RequestId, answer: AnswerStream | Refused) -> None:
        """The scheduler's answer."""
        if (asked := self._asked.get(request_id)) is not None:
            if isinstance(answer, AnswerStream):
                asked.word = None  # its new reader has the last word
            self._end(request_id)
            asked.answered(answer)

    def keeps_back(self, word: LastWord) -> bool:
        """Whether this is of a request that is asked for: then it is said only if that fails."""
        if (asked := self._asked.get(word.request_id)) is None:
            return False
        asked.word = asked.word or word
        return True

    def _ask(self, asked: _Asked) -> None:
        if self._last_words.are_said_of(asked.attach.request_id):
            self._send(asked.attach)

    def _end(self, request_id: RequestId) -> None:
        if (word := self._asked.pop(request_id).word) is not None:
            self._last_words.say(word)


def moved(request_id: RequestId) -> Refused:
    """What whoever reads a stream is told when somebody else takes it over here."""
    return Refused(request_id, ErrorCode.MOVED, "the stream goes on at another connection")
