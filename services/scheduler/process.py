"""`splitflap scheduler`: both sockets, the metrics page, and the end at a signal."""

import asyncio
import signal

from services.scheduler.gauges import SchedulerCollector
from services.scheduler.server import SchedulerServer
from shared.curve import server_keys
from shared.garbage import collect_seldom
from shared.guard import Guard
from shared.links import Router
from shared.logs import get_logger
from shared.messages import FROM_EXECUTOR, TO_SCHEDULER, ExecutorMessage, GatewayMessage
from shared.metrics import REGISTRY, serve_metrics
from shared.settings import SchedulerSettings

_log = get_logger("scheduler")


async def serve(settings: SchedulerSettings) -> None:
    """Run the scheduler until SIGTERM or SIGINT.

    Raises: StartError if an endpoint or the metrics port cannot be had.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with (
        Router[GatewayMessage](
            "request",
            settings.request_endpoint,
            TO_SCHEDULER,
            "--request-endpoint",
            server_keys(settings.curve_key_dir, "gateway"),
        ) as requests,
        Router[ExecutorMessage](
            "step",
            settings.step_endpoint,
            FROM_EXECUTOR,
            "--step-endpoint",
            server_keys(settings.curve_key_dir, "executor"),
        ) as steps,
        Guard("scheduler", settings.log_format) as guard,
    ):
        server = SchedulerServer(settings, requests, steps)
        REGISTRY.register(SchedulerCollector(server))
        page = await serve_metrics(settings.metrics_address) if settings.metrics_address else None
        _log.info("scheduler_listens", requests=settings.request_endpoint,
                  steps=settings.step_endpoint)  # fmt: skip
        collect_seldom()
        beating = asyncio.create_task(guard.keep_beating())
        work = asyncio.create_task(server.run())
        waiting = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # raises what ended it
        finally:
            for task in (work, waiting, beating):
                task.cancel()
            await asyncio.gather(work, waiting, beating, return_exceptions=True)
            if page is not None:
                await page.cleanup()
