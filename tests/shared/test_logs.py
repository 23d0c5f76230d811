"""Logs: events with units, whole lines, the service named in every thread."""

import json
import threading

import pytest
import structlog

from shared.errors import InvariantBroken
from shared.logs import configure_logs, get_logger


@pytest.fixture(autouse=True)
def logging_as_it_was():
    yield
    structlog.reset_defaults()


def test_json_lines_carry_the_event_its_fields_and_the_service(capsys):
    configure_logs("executor", "info", "json")
    speaker = threading.Thread(
        target=lambda: get_logger("sizing").info("pool", blocks=40, free=None)
    )
    speaker.start()
    speaker.join()
    get_logger("sizing").debug("not heard")
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told.pop("timestamp").endswith("Z")
    assert told == {
        "event": "pool", "blocks": 40, "room": "sizing", "service": "executor", "level": "info",
    }  # fmt: skip


def test_the_console_form_is_one_write_a_line(monkeypatch):
    writes = []

    class Stream:
        write = staticmethod(writes.append)
        flush = isatty = staticmethod(lambda: False)

    monkeypatch.setattr("sys.stderr", Stream())
    configure_logs("gateway", "warning")
    get_logger("http").warning("slow", took_ms=3)
    assert [(text.count("\n"), text[-1], "took_ms=3" in text) for text in writes] == [
        (1, "\n", True)
    ]


SECRET = "what a client wrote"


def fail_with(prompt):
    held = [prompt]
    try:
        return {}[held[0]]
    except KeyError as error:
        raise InvariantBroken("a law") from error


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize(("service", "is_told"), [("gateway", False), ("executor", True)])
def test_a_traceback_shows_places_and_a_gateways_no_words_of_clients(
    capsys, log_format, service, is_told
):
    configure_logs(service, "debug", log_format)
    try:
        fail_with(SECRET)
    except InvariantBroken:
        get_logger("http").exception("request_failed")
    told = capsys.readouterr().err
    assert "in fail_with" in told
    assert "shared.errors.InvariantBroken: a law" in told
    assert told.count(SECRET) == is_told  # the message of the KeyError, no variable
    assert told.index("KeyError") < told.index("which led to") < told.index("InvariantBroken: a")
