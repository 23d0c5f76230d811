"""What was seen of one request: raw bytes with the times at which they came, nothing understood."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Recording:
    """Times are seconds of one monotonic clock. `end_s` is None while the answer is not over."""

    arrival_s: float = 0.0
    """When the request was due; later than that it started if `--max-concurrency` held it back."""

    start_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    content_type: str = ""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    """(kind, story) of an error of the connection."""
