"""What only a gateway can count: tokens and ends are the scheduler's. Names are vLLM's."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from services.gateway.histogram import TokenHistogram
from shared.metrics import PREFIX, REGISTRY

_LATENCY_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0,
                     2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_WHOLE_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
                   120.0, 240.0, 480.0, 960.0)  # fmt: skip

HTTP_REQUESTS: Final = Counter(
    PREFIX + "http_requests",
    "Requests by path and status (499: the client left)",
    ["path", "status"],
    registry=REGISTRY,
)
REQUESTS_REJECTED: Final = Counter(
    PREFIX + "requests_rejected",
    "Requests answered with an error, by its code",
    ["reason"],
    registry=REGISTRY,
)
TIME_TO_FIRST_TOKEN: Final = Histogram(
    PREFIX + "time_to_first_token_seconds",
    "From the request's last byte to its first token",
    buckets=_LATENCY_S,
    registry=REGISTRY,
)
INTER_TOKEN_LATENCY: Final = TokenHistogram(
    PREFIX + "inter_token_latency_seconds",
    "Between deliveries of tokens of one choice",
    _LATENCY_S,
    REGISTRY,
)
E2E_LATENCY: Final = Histogram(
    PREFIX + "e2e_request_latency_seconds",
    "From the request's last byte to the answer's, if it ended in a finish",
    buckets=_WHOLE_S,
    registry=REGISTRY,
)
STREAMS_DETACHED: Final = Counter(
    PREFIX + "streams_detached",
    "Streams cut off that can be gone on with: client_gone, slow_reader or draining",
    ["reason"],
    registry=REGISTRY,
)
OPEN_REQUESTS: Final = Gauge(
    PREFIX + "open_requests", "Requests of this gateway that are being answered", registry=REGISTRY
)
