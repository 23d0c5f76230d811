"""What the scheduler says by itself: that somebody has waited for long."""

from structlog.testing import capture_logs

from services.scheduler.report import LONG_WAIT_S, warn_of_long_wait
from tests.scheduler.core.house import House


def test_a_wait_of_over_a_minute_is_warned_of():
    house = House(max_num_seqs=1)
    house.submit("A", max_tokens=20, ignore_eos=True)
    house.submit("B")
    with capture_logs() as logs:
        warn_of_long_wait(house.core, house.now + LONG_WAIT_S - 1)
        assert logs == []
        warn_of_long_wait(house.core, house.now + LONG_WAIT_S + 1)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("long_wait", "warning")
    assert (line["longest_wait_s"], line["waiting"]) == (LONG_WAIT_S + 1, 1)
