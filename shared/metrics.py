"""One registry a process, and the page that shows it.

Names follow vLLM's under the prefix `splitflap:`; each process serves its own `/metrics`.
"""

from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared.errors import StartError, WireError

PREFIX: Final = "splitflap:"
REGISTRY: Final = CollectorRegistry()

MESSAGES_DROPPED: Final = Counter(
    PREFIX + "messages_dropped",
    "Messages of a peer that were no messages of this protocol, by reason",
    ["link", "reason"],
    registry=REGISTRY,
)
MESSAGES_UNSENT: Final = Counter(
    PREFIX + "messages_unsent",
    "Messages that a full or vanished peer could not be sent",
    ["link"],
    registry=REGISTRY,
)
PEERS_REFUSED: Final = Counter(
    PREFIX + "peers_refused",
    "Tries to connect that failed at CURVE keys, by reason",
    ["link", "reason"],
    registry=REGISTRY,
)


def count_dropped(link: str, error: WireError) -> None:
    """Count one message that was dropped for `error.reason`."""
    MESSAGES_DROPPED.labels(link=link, reason=error.reason).inc()


async def metrics_page(_request: web.Request) -> web.Response:
    """`GET /metrics`: this process's registry."""
    return web.Response(
        body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


async def serve_metrics(address: tuple[str, int]) -> web.AppRunner:
    """Serve `/metrics` alone at `address` (host, port); the caller cleans the runner up.

    Raises: StartError if the port is taken.
    """
    host, port = address
    app = web.Application()
    app.router.add_get("/metrics", metrics_page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --metrics-port"
        ) from error
    return runner
