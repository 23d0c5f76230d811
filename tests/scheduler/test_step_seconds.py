"""Where the time of a step goes."""

import pytest

from services.scheduler.step_seconds import StepSeconds
from shared.messages import StepTimings


def test_what_the_executor_does_not_report_is_the_links():
    seconds = StepSeconds()
    seconds.sent(1, 10.0)
    seconds.returned(1, StepTimings(forward_s=0.5, sample_s=0.1), 10.7)
    assert seconds.by_part == pytest.approx(
        {"swap": 0, "copy": 0, "forward": 0.5, "sample": 0.1, "link": 0.1}
    )


def test_a_plan_sent_ahead_begins_when_the_one_before_it_ends():
    seconds = StepSeconds()
    seconds.sent(1, 10.0)
    seconds.sent(2, 10.01)
    seconds.returned(1, StepTimings(forward_s=0.5), 10.6)
    seconds.returned(2, StepTimings(forward_s=0.5), 11.2)
    assert seconds.by_part["link"] == pytest.approx(0.2)


def test_a_result_of_a_lost_plan_counts_for_nothing():
    seconds = StepSeconds()
    seconds.sent(1, 10.0)
    seconds.lost()
    seconds.sent(5, 11.0)
    seconds.returned(1, StepTimings(forward_s=0.5), 12.0)
    assert sum(seconds.by_part.values()) == 0


def test_the_first_plan_after_a_loss_is_progress_though_its_number_follows():
    """Else the next executor would be given up for the time that the one before it lost."""
    seconds = StepSeconds()
    seconds.sent(1, 10.0)
    seconds.sent(2, 10.0)
    seconds.lost()
    seconds.sent(3, 80.0)
    assert seconds.moved_at == 80.0


def test_a_refusal_is_progress_too():
    seconds = StepSeconds()
    seconds.sent(1, 10.0)
    seconds.sent(2, 10.0)
    seconds.refused(1, 12.0)
    assert seconds.moved_at == 12.0
