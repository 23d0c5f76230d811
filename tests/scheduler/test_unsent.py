"""Plans that could not be sent: what is said of each, and when."""

from services.scheduler.unsent import Unsent
from shared.ids import Boot
from shared.messages import StepFailed


def test_each_is_refused_once_and_in_its_turn():
    unsent = Unsent()
    refusals = [StepFailed(Boot(7), step_id, "oversized") for step_id in (3, 4)]
    for refusal in refusals:
        unsent.keep(refusal)
    told = [unsent.due(oldest) for oldest in (None, 2, 3, 3, 4, None)]
    assert told == [None, None, refusals[0], None, refusals[1], None]


def test_a_lost_executor_takes_its_plans_along():
    unsent = Unsent()
    unsent.keep(StepFailed(Boot(7), 3, "oversized"))
    unsent.lost()
    assert unsent.due(3) is None
