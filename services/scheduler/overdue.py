"""Steps that do not come back, and the executors that are given up for them.

Heartbeats come from a thread of their own, so that an executor whose computing thread hangs beats
on. What tells is progress.
"""

from collections import deque
from typing import Final

from shared.ids import Boot

SLACK: Final = 10.0
"""The measured rates are those of short contexts, on a machine with nothing else to do."""
EARLY: Final = 0.5
"""The share of the limit after which health says that something is wrong."""
MOST_REMEMBERED: Final = 64


class Overdue:
    """How long a step may take, and who took longer.

    A long prefill is no hang: the limit is `--step-timeout`, or ten times what the step should take
    at the rates that the executor measured, whichever is longer.

    >>> overdue = Overdue(step_timeout_s=60.0)
    >>> overdue.limit_s(expected_s=0.4), overdue.limit_s(expected_s=20.0)
    (60.0, 200.0)
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._given_up: deque[Boot] = deque(maxlen=MOST_REMEMBERED)
        self.timeouts = 0

    def limit_s(self, expected_s: float) -> float:
        """Seconds from the last sign of progress until the executor is given up."""
        return max(self._step_timeout_s, SLACK * expected_s)

    def is_early(self, standstill_s: float, expected_s: float) -> bool:
        """Whether it is time for health to warn."""
        return standstill_s > EARLY * self.limit_s(expected_s)

    def is_over(self, standstill_s: float, expected_s: float) -> bool:
        """Whether to give up the executor."""
        return standstill_s > self.limit_s(expected_s)

    def give_up(self, boot: Boot) -> None:
        """This one hangs, and is never to be taken again."""
        self.timeouts += 1
        self._given_up.append(boot)

    def is_given_up(self, boot: Boot) -> bool:
        """Whether it is one of the last that hung."""
        return boot in self._given_up
