"""A waiter is woken by news and by times, whichever is first, and by no time of an earlier wait."""

import asyncio
import math
import time

from services.gateway.news import News


async def test_news_that_came_before_are_not_waited_for() -> None:
    news = News()
    news.come()
    news.come()
    assert await news.wait(0.0)
    assert not await news.wait(time.monotonic() + 0.01)


async def test_news_end_a_wait_and_a_time_does_where_none_come() -> None:
    news = News()
    asyncio.get_running_loop().call_later(0.01, news.come)
    assert await news.wait(math.inf)
    until = time.monotonic() + 0.05
    assert not await news.wait(until)
    assert time.monotonic() > until - 0.002


async def test_a_time_that_was_waited_for_before_wakes_nobody() -> None:
    news = News()
    soon = time.monotonic() + 0.05
    asyncio.get_running_loop().call_soon(news.come)
    assert await news.wait(soon)
    until = soon + 0.05
    assert not await news.wait(until)
    assert time.monotonic() > until - 0.002
    asyncio.get_running_loop().call_later(0.02, news.come)
    assert await news.wait(math.inf)
    news.close()


async def test_a_waiter_that_is_cancelled_leaves_nothing() -> None:
    news = News()
    waiting = asyncio.create_task(news.wait(math.inf))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    news.come()
    assert await news.wait(math.inf)
