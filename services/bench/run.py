"""Sends the requests of a bench and brings back recordings, whatever happens meanwhile."""

import asyncio
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.bench.answer import read_answer
from services.bench.arrivals import arrival_times_s
from services.bench.body import BodyMaker
from services.bench.client import Client, first_model, open_session
from services.bench.load import Pace, send_all
from services.bench.plan import Planned
from services.bench.progress import progress
from services.bench.recording import Recording
from services.bench.settings import BenchSettings

_WARM_UP_MAX_TOKENS: Final = 16


class WallClock:
    """The real time."""

    def now_s(self) -> float:
        """Seconds, monotonic."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of each request, not yet understood; those that did not end have no `end_s`."""

    model: str
    start_s: float
    duration_s: float
    was_interrupted: bool
    recordings: Sequence[Recording]


async def run(settings: BenchSettings, plans: Sequence[Planned], warm_up: Sequence[Planned]) -> Run:
    """Warm up, then send `plans` at the chosen pace; SIGINT and SIGTERM end it early.

    Raises: StartError if no model is named and the server lists none.
    """
    _allow_many_connections()
    recordings = [Recording() for _ in plans]
    clock = WallClock()
    async with open_session(settings.headers, settings.request_timeout) as session:
        model = settings.model or await first_model(session, settings.root_url)
        maker = BodyMaker(
            model, settings.chosen_backend, settings.sampling, json.loads(settings.extra_body)
        )
        bodies = [maker.body(plan) for plan in plans]
        client = Client(session, settings.url)
        for plan in warm_up:
            await _warm_up(client, maker, plan)
        show = progress(len(plans), is_wanted=not settings.disable_tqdm)
        with show as one_more:

            async def send(index: int, due_s: float) -> None:
                recordings[index].arrival_s = due_s
                await client.send(bodies[index], recordings[index])
                one_more()

            start_s = clock.now_s()
            load = asyncio.ensure_future(send_all(len(plans), _pace(settings), clock, send))
            was_interrupted = await _until_done_or_interrupted(load)
            duration_s = clock.now_s() - start_s
    return Run(model, start_s, duration_s, was_interrupted, recordings)


def _allow_many_connections() -> None:
    """Each is a file; the usual limit of 1,024 is one that any process may lift."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _pace(settings: BenchSettings) -> Pace:
    arrivals = None
    if not math.isinf(settings.request_rate):
        arrivals = arrival_times_s(
            settings.count, settings.request_rate, settings.burstiness, settings.seed
        )
    return Pace(arrivals, settings.max_concurrency, settings.max_seconds)


async def _warm_up(client: Client, maker: BodyMaker, plan: Planned) -> None:
    short = replace(plan, max_tokens=min(plan.max_tokens, _WARM_UP_MAX_TOKENS))
    recording = Recording()
    await client.send(maker.body(short), recording)
    failure = read_answer(recording, plan.num_choices).failure
    if failure is not None:
        sys.stderr.write(f"splitflap bench: warm-up failed: {': '.join(failure)}\n")


async def _until_done_or_interrupted(load: "asyncio.Future[None]") -> bool:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, load.cancel)
    try:
        await asyncio.wait([load])
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # which leaves the system's default behind
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if load.cancelled():
        return True
    await load
    return False
