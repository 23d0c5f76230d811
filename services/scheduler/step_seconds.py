"""Where the time between a plan and its result goes."""

from shared.messages import StepTimings


class StepSeconds:
    """Seconds so far, by part: what the executor reports, and the rest (`link`).

    The rest is encoding, sockets, checking the plan, and waiting for a processor. A plan sent ahead
    waits for the one before it too: its time begins with that one's result.
    """

    def __init__(self) -> None:
        self.by_part = dict.fromkeys(("swap", "copy", "forward", "sample", "link"), 0.0)
        self._sent: dict[int, float] = {}
        self.moved_at = 0.0
        """When a step last came back, or was sent while none was under way: the last progress."""

    def sent(self, step_id: int, at: float) -> None:
        """A plan leaves at `at` (seconds, monotonic)."""
        self._sent[step_id] = at
        if len(self._sent) == 1:
            self.moved_at = at

    def lost(self) -> None:
        """The executor is gone, and with it the plans that were sent."""
        self._sent.clear()

    def refused(self, step_id: int, at: float) -> None:
        """The executor answered at `at` that it did not run this one."""
        if self._sent.pop(step_id, None) is not None:
            self.moved_at = at

    def stood_still(self, seconds: float) -> None:
        """This process did: so long nobody could have told it of any progress."""
        self.moved_at += seconds

    def returned(self, step_id: int, timings: StepTimings, at: float) -> None:
        """Its result came at `at`."""
        sent_at = self._sent.pop(step_id, None)
        if sent_at is None:
            return
        began_at, self.moved_at = self.moved_at, at
        reported = {
            "swap": timings.swap_s,
            "copy": timings.copy_s,
            "forward": timings.forward_s,
            "sample": timings.sample_s,
        }
        reported["link"] = max(0.0, at - max(sent_at, began_at) - sum(reported.values()))
        for part, seconds in reported.items():
            self.by_part[part] += seconds
