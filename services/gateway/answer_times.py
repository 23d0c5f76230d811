"""When the tokens of one answer came, for the metrics and the log."""

import time

from services.gateway import gauges
from services.gateway.answer_stream import Piece


class AnswerTimes:
    """Begins when the request has arrived (monotonic seconds)."""

    def __init__(self, arrived_at: float) -> None:
        self._began = arrived_at
        self._is_measured = True
        self._last_at: dict[int, float] = {}
        self.ttft_s: float | None = None

    def begin_anywhere(self) -> None:
        """The answer had begun before: its times say nothing of this server's."""
        self._is_measured = False

    def observe(self, index: int, piece: Piece) -> None:
        """Tokens of a choice came."""
        if not piece.token_ids or not self._is_measured:
            return
        now = time.monotonic()
        if self.ttft_s is None:
            self.ttft_s = now - self._began
            gauges.TIME_TO_FIRST_TOKEN.observe(self.ttft_s)
        last_at = self._last_at.get(index)
        if last_at is not None:
            gauges.INTER_TOKEN_LATENCY.observe(now - last_at)
        self._last_at[index] = now

    def ended(self) -> None:
        """The answer is with its client, and no error."""
        if self._is_measured:
            gauges.E2E_LATENCY.observe(time.monotonic() - self._began)
