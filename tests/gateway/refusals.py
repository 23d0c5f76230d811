"""What it takes to be refused well."""

from typing import Any

from shared.messages import Submit
from tests.gateway.house import House


async def refused(house: House, path: str, fields: dict[str, Any]) -> tuple[int, str, str, str]:
    """(status, param, code, message); the form is checked, and that nothing was submitted."""
    before = house.scheduler.of(Submit)
    status, told = await house.post(path, **fields)
    assert 400 <= status < 500, told
    assert set(told) == {"error"}
    error = told["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert house.scheduler.of(Submit) == before, "the pool must not hear of it"
    assert (await house.complete())["choices"][0]["text"] == "ok", "the server goes on"
    return status, error["param"], error["code"], error["message"]
