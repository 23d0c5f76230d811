"""Executors that ask to be taken while another one is at work: when to write a line about one."""

from typing import Final

from shared.ids import Boot

REMIND_S: Final = 60.0
"""They ask twice a second: one line a minute is enough."""
MOST_REMEMBERED: Final = 64


class Bystanders:
    """Remembers the last few, and when a line was written about each."""

    def __init__(self) -> None:
        self._told_at: dict[Boot, float] = {}

    def is_news(self, boot: Boot, now: float) -> bool:
        """Whether a line about this one is due; the caller writes it."""
        told_at = self._told_at.get(boot)
        if told_at is not None and now - told_at < REMIND_S:
            return False
        self._told_at.pop(boot, None)
        self._told_at[boot] = now
        if len(self._told_at) > MOST_REMEMBERED:
            del self._told_at[next(iter(self._told_at))]  # told of the longest ago
        return True
