"""Plans that could not be sent, though the core counts them as in flight."""

from shared.messages import StepFailed


class Unsent:
    """Their refusals, each kept until its plan is the oldest in flight.

    Results come in the order of the plans: the core drops one that comes before its turn, and would
    wait for that plan for ever.

    >>> unsent = Unsent()
    >>> unsent.keep(StepFailed(7, 2, "too long"))
    >>> unsent.due(1), unsent.due(2).message, unsent.due(2)
    (None, 'too long', None)
    """

    def __init__(self) -> None:
        self._refusals: dict[int, StepFailed] = {}

    def keep(self, refusal: StepFailed) -> None:
        """This is what will be said of its plan."""
        self._refusals[refusal.step_id] = refusal

    def due(self, oldest: int | None) -> StepFailed | None:
        """The refusal of the oldest plan in flight, once; None if that one was sent, or is none."""
        return self._refusals.pop(oldest, None) if oldest is not None else None

    def lost(self) -> None:
        """The executor is gone, and with it every plan in flight, sent or not."""
        self._refusals.clear()
