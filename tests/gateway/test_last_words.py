"""What is said last of a request, by a link that may be broken."""

import pytest

from services.gateway.last_words import LastWord, LastWords, gone
from shared.ids import RequestId
from shared.messages import Detach, Done

ONE, OTHER = RequestId("cmpl-1"), RequestId("cmpl-2")


class Link:
    """Takes what it is given, unless it is broken."""

    def __init__(self) -> None:
        self.is_broken = False
        self.said: list[LastWord] = []

    def send(self, word: LastWord) -> bool:
        if not self.is_broken:
            self.said.append(word)
        return not self.is_broken


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def last_words(link: Link) -> LastWords:
    return LastWords(link.send)


def test_what_cannot_be_said_is_said_at_a_later_beat_once(link: Link, last_words) -> None:
    link.is_broken = True
    last_words.say(Detach(ONE))
    last_words.beat(set())
    assert not last_words.are_said_of(ONE)
    assert last_words.are_said_of(OTHER)
    link.is_broken = False
    last_words.beat(set())
    last_words.beat(set())
    assert link.said == [Detach(ONE)]
    assert last_words.are_said_of(ONE)


def test_what_comes_for_a_stream_that_was_left_does_not_end_it(link: Link, last_words) -> None:
    """Its tokens and its end were on their way: the reader's own word is not lost to theirs."""
    link.is_broken = True
    last_words.say(Detach(ONE))
    last_words.came_for_nobody(ONE)
    last_words.beat(set())
    link.is_broken = False
    last_words.say(Done(ONE))
    assert link.said == [Detach(ONE)]


def test_tokens_for_nobody_end_their_request_unless_it_has_a_reader_by_then(
    link: Link, last_words
) -> None:
    last_words.came_for_nobody(ONE)
    last_words.came_for_nobody(OTHER)
    last_words.beat({ONE})
    last_words.beat(set())
    assert link.said == [gone(OTHER)]


def test_another_scheduler_is_told_nothing_of_requests_it_never_heard_of(
    link: Link, last_words
) -> None:
    link.is_broken = True
    last_words.say(gone(ONE))
    last_words.came_for_nobody(OTHER)
    last_words.forget()
    link.is_broken = False
    last_words.beat(set())
    assert link.said == []
