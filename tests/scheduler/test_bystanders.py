"""Executors that wait while another one works: a line about each, not one for each asking."""

from services.scheduler.bystanders import MOST_REMEMBERED, REMIND_S, Bystanders
from shared.ids import Boot


def test_each_is_told_of_once_though_two_ask_in_turn():
    bystanders = Bystanders()
    asked = [(Boot(1 + turn % 2), turn / 2) for turn in range(100)]
    assert [boot for boot, now in asked if bystanders.is_news(boot, now)] == [1, 2]


def test_each_is_told_of_again_after_a_minute():
    bystanders = Bystanders()
    assert bystanders.is_news(Boot(1), 5.0)
    assert not bystanders.is_news(Boot(1), 4.9 + REMIND_S)
    assert bystanders.is_news(Boot(1), 5.0 + REMIND_S)


def test_of_many_the_last_are_remembered():
    bystanders = Bystanders()
    for boot in range(MOST_REMEMBERED + 1):
        bystanders.is_news(Boot(boot), 0.0)
    assert not bystanders.is_news(Boot(1), 1.0)
    assert bystanders.is_news(Boot(0), 1.0)
