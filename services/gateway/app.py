"""The gateway process: HTTP on one side, the scheduler on the other."""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

from aiohttp import web

from services.gateway import gauges
from services.gateway.connection_clock import ClockTimes, clocked
from services.gateway.cors import AllowedOrigins
from services.gateway.http_connection import HttpConnection
from services.gateway.keys import ApiKeys
from services.gateway.link import SchedulerLink
from services.gateway.middleware import around
from services.gateway.readiness import LinkTimes
from services.gateway.request_reading import HttpLimits
from services.gateway.routes import Routes
from services.gateway.tokenizer import load_tokenizer
from shared.curve import client_keys
from shared.errors import StartError
from shared.garbage import collect_seldom
from shared.guard import Guard
from shared.logs import get_logger
from shared.metrics import serve_metrics
from shared.model_source import find_model
from shared.settings import GatewaySettings

KEEPALIVE_S: Final = 620.0  # longer than any balancer's own (nginx 60, ALB 60, Google 600)
LINGERING_S: Final = 1.0  # the rest of a refused body is read so long, then the connection ends
BACKLOG: Final = 1024
_LAST_WORDS_S: Final = 2.0  # for error events to go out when the drain is over

_log = get_logger("gateway")
_http_noise = logging.getLogger("splitflap.http")
_http_noise.setLevel(logging.CRITICAL)  # bad HTTP is answered 400, not logged with a traceback


class Gateway:
    """One gateway: `start`, then `drain` and `close`.

    Raises: StartError if the model has no usable tokenizer.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        link_times: LinkTimes | None = None,
    ) -> None:
        source = find_model(settings.model)
        tokenizer = load_tokenizer(source)
        self._settings = settings
        self._is_toy = source.is_toy
        self._clock_times = ClockTimes(
            settings.request_read_timeout_s, settings.slow_reader_timeout_s
        )
        self._link = SchedulerLink(
            settings.request_endpoint,
            source.name,
            tokenizer.vocab_size,
            link_times,
            client_keys(settings.curve_key_dir, "gateway"),
        )
        limits = HttpLimits(
            settings.max_body_bytes, settings.request_read_timeout_s, settings.ping_interval_s
        )
        names = (settings.served_model_name or source.name,)
        self._keys = ApiKeys(settings.api_key, settings.api_key_file)
        self._origins = AllowedOrigins(settings.allowed_origins)
        self._routes = Routes(
            tokenizer,
            self._link,
            names,
            limits,
            settings.stream_interval,
            needs_key=self._keys.are_set,
        )
        self._link_task: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._metrics: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._address: tuple[str, int] | None = None
        gauges.OPEN_REQUESTS.set_function(lambda: self._link.num_open)

    @property
    def link(self) -> SchedulerLink:
        """The connection to the scheduler."""
        return self._link

    @property
    def keys(self) -> ApiKeys:
        """Who may ask."""
        return self._keys

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        if self._address is None:
            raise RuntimeError("start comes first")
        return self._address

    async def start(self) -> None:
        """Listen, and connect to the scheduler (which may come later).

        Raises: StartError if the host is none of ours, a port is taken, or the model's chat
        template cannot be read.
        """
        if not self._is_toy:
            await asyncio.to_thread(self._routes.check_template)
        if self._settings.metrics_address is not None:
            self._metrics = await serve_metrics(self._settings.metrics_address)
        app = web.Application(
            middlewares=[around, self._origins.preflight, self._keys.guard],
            client_max_size=self._settings.max_body_bytes,
        )
        self._origins.add_to(app)
        self._routes.add_to(app)
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_LAST_WORDS_S,
        )
        await runner.setup()
        self._runner = runner
        host, port = self._settings.host, self._settings.port
        make_protocol = clocked(_protocols_of(runner), self._clock_times)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                make_protocol, host, port, backlog=BACKLOG
            )
        except (OSError, UnicodeError) as error:
            raise _cannot_listen(host, port, error) from error
        self._address = self._server.sockets[0].getsockname()[:2]
        self._link_task = asyncio.create_task(self._link.run(), name="scheduler link")

    async def run_until(self, leave: asyncio.Event) -> None:
        """Serve until `leave` is set.

        Raises: what the link died of, if it did (a bug of ours).
        """
        if self._link_task is None:
            raise RuntimeError("start comes first")
        waiting = asyncio.create_task(leave.wait())
        await asyncio.wait({waiting, self._link_task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._link_task.done():
            self._link_task.result()

    async def drain(self) -> None:
        """Take no more; let open requests finish, and end those that last too long."""
        self._routes.is_draining = True
        if self._server is not None:
            self._server.close()
        seconds = self._settings.shutdown_timeout
        _log.info("draining", open_requests=self._link.num_open, at_most_s=seconds)
        if not await self._all_released(seconds):
            _log.warning("drain_cut_short", open_requests=self._link.num_open)
            self._link.leave("the server is shutting down; send the request again")
            await self._all_released(_LAST_WORDS_S)

    async def close(self) -> None:
        """Give back sockets and tasks."""
        if self._server is not None:
            self._server.close()
        for runner in (self._runner, self._metrics):
            if runner is not None:
                await runner.cleanup()
        if self._link_task is not None:
            self._link_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._link_task
        self._link.close()
        self._routes.close()

    async def _all_released(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._link.wait_idle()
        except TimeoutError:
            return False
        return True


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until SIGTERM or SIGINT, then let open requests finish.

    Raises: StartError.
    """
    gateway = Gateway(settings)  # may load a tokenizer from far away: nobody watches that
    async with AsyncExitStack() as exits:
        exits.push_async_callback(gateway.close)
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave.set)
        if settings.api_key_file is not None:
            loop.add_signal_handler(signal.SIGHUP, gateway.keys.reload)
        await gateway.start()
        guard = exits.enter_context(Guard("gateway", settings.log_format))
        exits.callback(asyncio.create_task(guard.keep_beating()).cancel)
        host, port = gateway.address
        collect_seldom()
        _log.info("listening", url=f"http://{host}:{port}", model=settings.model)
        if not gateway.keys.are_set and not ipaddress.ip_address(host).is_loopback:
            _log.warning("no_api_keys", host=host, so="whoever reaches this port may ask")
        await gateway.run_until(leave)
        await gateway.drain()


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> StartError:
    """UnicodeError: the host is not even a name."""
    told = (isinstance(error, OSError) and error.strerror) or str(error)
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror):
        advice = "give --host a name or an address of this machine"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "give --host an address of this machine"
    else:
        advice = "choose another --port, or stop what listens there"
    return StartError(f"cannot listen on {host}:{port} ({told}): {advice}")


def _protocols_of(runner: web.AppRunner) -> Callable[[], HttpConnection]:
    """Makes a connection's HTTP protocol."""
    server = runner.server
    if server is None:
        raise RuntimeError("setup comes first")
    loop = asyncio.get_running_loop()
    return lambda: HttpConnection(
        server,
        loop=loop,
        access_log=_http_noise,  # off; our middleware logs
        logger=_http_noise,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGERING_S,
    )
