from services.executor.adoption import Adoption
from shared.ids import Boot
from shared.messages import Heartbeat

OURS, OTHER = Boot(1), Boot(2)


def adopted(now=0.0):
    adoption = Adoption(checked_at=now)
    assert adoption.adopt(OURS, now)
    return adoption


def beating(adoption, until):
    """Heartbeats and checks twice a second; why it was lost, if it was."""
    for tick in range(1, int(2 * until) + 1):
        why = adoption.hear(Heartbeat(OURS), tick / 2) or adoption.check(tick / 2)
        if why:
            return why
    return None


def test_it_lasts_while_both_sides_beat():
    adoption = adopted()
    assert beating(adoption, until=60) is None
    assert adoption.scheduler == OURS


def test_the_same_scheduler_twice_is_no_news():
    adoption = adopted()
    number = adoption.number
    assert not adoption.adopt(OURS, 1.0)
    assert adoption.number == number


def test_another_scheduler_ends_it():
    adoption = adopted()
    assert adoption.hear(Heartbeat(OTHER), 0.5) == "another scheduler"
    assert adoption.scheduler is None
    assert adoption.adopt(OTHER, 0.6)
    assert adoption.hear(Heartbeat(OTHER), 0.7) is None


def test_another_scheduler_may_take_over_at_once():
    adoption = adopted()
    number = adoption.number
    assert adoption.adopt(OTHER, 0.5)
    assert (adoption.scheduler, adoption.number > number) == (OTHER, True)


def test_silence_ends_it_after_three_seconds():
    adoption = adopted()
    assert [adoption.check(tick / 2) for tick in range(7)] == [None] * 7
    assert adoption.check(3.5) == "the scheduler is silent for 3 s"
    assert adoption.check(4.0) is None  # said once


def test_having_stood_still_ends_it():
    adoption = adopted()
    assert beating(adoption, until=5) is None
    assert adoption.hear(Heartbeat(OURS), 9.0) is None  # it had waited in the socket
    assert adoption.check(9.0) == "this process stood still for 4.0 s"


def test_a_scheduler_that_waits_for_an_executor_has_given_us_up():
    assert adopted().hear(Heartbeat(OURS, "waiting"), 0.5) == "the scheduler gave us up"


def test_nobody_is_lost_before_somebody_came():
    adoption = Adoption(checked_at=0.0)
    assert adoption.check(100.0) is None
    assert adoption.hear(Heartbeat(OURS, "waiting"), 101.0) is None


def test_each_adoption_and_loss_has_a_number_of_its_own():
    adoption = adopted()
    numbers = [adoption.number]
    adoption.lose("a test")
    numbers.append(adoption.number)
    adoption.adopt(OURS, 1.0)
    numbers.append(adoption.number)
    assert len(set(numbers)) == 3
