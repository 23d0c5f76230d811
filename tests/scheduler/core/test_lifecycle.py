"""Every step of the lifecycle is a row of the table; every other one raises and changes nothing."""

import itertools

import pytest

from services.scheduler.core.book import Book
from services.scheduler.core.decoding import Sample
from services.scheduler.core.events import Gateway
from services.scheduler.core.lifecycle import TRANSITIONS, Change, Status, status_after
from services.scheduler.core.line import Line
from services.scheduler.core.policies.order import Fcfs
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.ids import RequestId, SequenceId
from shared.messages import Submit
from shared.sampling import SamplingParams

EVERY_PAIR = list(itertools.product(Status, Change))
WAY_TO = {
    Status.WAITING: (),
    Status.RUNNING: (Change.START,),
    Status.SWAPPED: (Change.START, Change.SWAP_OUT),
    Status.PINNED: (Change.START, Change.PIN),
    Status.FINISHED: (Change.END,),
}


def a_request(name="A", arrival=1.0):
    params = SamplingParams(max_tokens=4)
    return Request(
        Submit(RequestId(name), (1, 2), params),
        gateway=Gateway(b"g"),
        arrival=arrival,
        max_tokens=4,
        decoding=Sample(params, ()),
        sequences=(Sequence(SequenceId(1), 0, (1, 2)),),
    )


def a_book_with(request, status):
    book = Book(Fcfs())
    book.add(request)
    for change in WAY_TO[status]:
        book.change(request, change)
    assert request.status is status
    return book


@pytest.mark.parametrize(("status", "change"), EVERY_PAIR)
def test_a_pair_is_in_the_table_or_it_raises_and_changes_nothing(status, change):
    request = a_request()
    book = a_book_with(request, status)
    lines = {s: list(book.line(s)) for s in Status if s is not Status.FINISHED}
    if (status, change) in TRANSITIONS:
        book.change(request, change)
        assert request.status is TRANSITIONS[status, change]
        return
    with pytest.raises(InvariantBroken, match=f"a {status} request cannot {change}"):
        book.change(request, change)
    assert request.status is status
    assert {s: list(book.line(s)) for s in Status if s is not Status.FINISHED} == lines


def test_nothing_leads_out_of_finished():
    assert not [change for status, change in TRANSITIONS if status is Status.FINISHED]


def test_every_status_is_reached_and_every_live_one_can_end():
    assert {Status.WAITING, *TRANSITIONS.values()} == set(Status)
    for status in set(Status) - {Status.FINISHED}:
        assert status_after(status, Change.END) is Status.FINISHED


def test_a_book_takes_each_id_once_and_forgets_only_what_is_over():
    request = a_request()
    book = a_book_with(request, Status.RUNNING)
    with pytest.raises(InvariantBroken, match="in the book already"):
        book.add(a_request())
    with pytest.raises(InvariantBroken, match="not finished"):
        book.forget(request)
    book.change(request, Change.END)
    book.forget(request)
    assert len(book) == 0


def test_a_line_is_sorted_by_arrival_and_then_by_id_whoever_comes_first():
    requests = [a_request("D", 2.0), a_request("A", 2.0), a_request("C", 1.0), a_request("B", 3.0)]
    for order in itertools.permutations(requests):
        line = Line(Fcfs())
        for request in order:
            line.add(request)
        assert [request.request_id for request in line] == ["C", "A", "D", "B"]
        assert (line.first.request_id, line.last.request_id) == ("C", "B")
        line.remove(order[0])
        assert order[0] not in line
        assert len(line) == 3


def test_a_line_refuses_a_twin_a_stranger_and_to_be_asked_when_empty():
    line = Line(Fcfs())
    with pytest.raises(InvariantBroken, match="nobody"):
        _ = line.first
    with pytest.raises(InvariantBroken, match="nobody"):
        _ = line.last
    line.add(a_request("A"))
    with pytest.raises(InvariantBroken, match="two requests"):
        line.add(a_request("A"))
    with pytest.raises(InvariantBroken, match="not in this line"):
        line.remove(a_request("A"))
