"""When requests are sent, in virtual time."""

from services.bench.load import Pace, send_all
from tests.bench.virtual_clock import VirtualClock


async def sent(count, answer_s, *, arrivals_s=None, max_concurrency=None, max_seconds=None):
    """[(index, due, sent)] in seconds from the start; request i takes `answer_s(i)`."""
    clock, seen = VirtualClock(), []
    start_s = clock.now_s()

    async def send(index, due_s):
        seen.append((index, due_s - start_s, clock.now_s() - start_s))
        await clock.sleep(answer_s(index))

    await clock.run(send_all(count, Pace(arrivals_s, max_concurrency, max_seconds), clock, send))
    return seen


async def test_in_a_closed_loop_a_client_sends_when_it_has_its_answer():
    seen = await sent(5, lambda index: [3, 1, 1, 5, 1][index], max_concurrency=2)
    assert [(index, at) for index, _, at in seen] == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


async def test_without_a_limit_all_are_sent_at_once():
    seen = await sent(4, lambda _: 1)
    assert [at for _, _, at in seen] == [0, 0, 0, 0]


async def test_in_an_open_loop_requests_come_when_they_are_due():
    seen = await sent(3, lambda _: 10, arrivals_s=[0.5, 0.75, 4])
    assert seen == [(0, 0.5, 0.5), (1, 0.75, 0.75), (2, 4, 4)]


async def test_a_limit_holds_arrivals_back():
    seen = await sent(3, lambda _: 2, arrivals_s=[0, 0.5, 1], max_concurrency=1)
    assert seen == [(0, 0, 0), (1, 0.5, 2), (2, 1, 4)]


async def test_nothing_is_sent_after_the_end():
    closed = await sent(10, lambda _: 2, max_concurrency=1, max_seconds=5)
    assert [at for _, _, at in closed] == [0, 2, 4]
    opened = await sent(4, lambda _: 9, arrivals_s=[1, 2, 6, 7], max_seconds=5)
    assert [at for _, _, at in opened] == [1, 2]
    held = await sent(3, lambda _: 9, arrivals_s=[1, 2, 3], max_concurrency=1, max_seconds=5)
    assert [at for _, _, at in held] == [1]
