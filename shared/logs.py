"""One way to log: events with units, on a console or as JSON lines.

No line holds what clients wrote: a traceback shows places, never the values of variables, and in a
gateway no message of an error that is not ours, which may repeat a piece of a prompt.
"""

import logging
import sys
import traceback
from typing import Any, Literal

import structlog

from shared.errors import SplitflapError


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

    def tell_error(_logger: Any, _method: str, event: Any) -> Any:
        given = event.pop("exc_info", None)
        error = given if isinstance(given, BaseException) else sys.exc_info()[1] if given else None
        if error is not None:
            event["exception"] = story_of(error, hides_messages=service == "gateway")
        return event

    processors: list[Any] = [
        _without_nothing,
        add_service,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        tell_error,
    ]
    if log_format == "json":
        processors += [structlog.processors.JSONRenderer()]
    else:
        processors += [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, force=True)


def story_of(error: BaseException, *, hides_messages: bool) -> str:
    """Where an error came from, and from which other one, the first one first."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 10:
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        is_told = isinstance(cause, SplitflapError) or not hides_messages
        places = "".join(traceback.format_tb(cause.__traceback__))
        parts.append(f"{places}{kind}: {cause if is_told else '(message left out)'}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\nwhich led to\n".join(reversed(parts))


def _without_nothing(_logger: Any, _method: str, event: Any) -> Any:
    return {name: value for name, value in event.items() if value is not None}


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; `name` says which room speaks."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(room=name)
    return logger
