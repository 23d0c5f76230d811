"""One way to log: events with units, on a console or as JSON lines."""

import logging
import sys
from typing import Any, Literal

import structlog


def configure_logs(
    service: str, level: str = "info", log_format: Literal["console", "json"] = "console"
) -> None:
    """Send every event to stderr with time, level and `service`; fields that are None left out.

    `level` is debug, info, warning or error.
    """
    number = logging.getLevelNamesMapping()[level.upper()]

    def add_service(_logger: Any, _method: str, event: Any) -> Any:  # in every thread
        event["service"] = service
        return event

    processors: list[Any] = [
        _without_nothing,
        add_service,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, force=True)


def _without_nothing(_logger: Any, _method: str, event: Any) -> Any:
    return {name: value for name, value in event.items() if value is not None}


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; `name` says which room speaks."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(room=name)
    return logger
