"""/v1/prefixes: what is pinned, listed and let go, and that a restart loses nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.gateway import prefix_routes
from services.gateway.pins import GatewayPins
from shared.errors import ErrorCode
from shared.ids import Boot, RequestId
from shared.messages import ListPins, Pin, Pinned, Pins, Refused, Submit, Unpin, Unpinned
from tests.gateway.house import House, held_stream, open_gateway, open_house, restart

PATH = "/v1/prefixes"


async def pin(house: House, **fields: Any) -> dict[str, Any]:
    status, told = await house.post(PATH, **{"prompt": "Once upon a time", **fields})
    assert status == 200, told
    return told


async def delete(house: House, pin_id: str) -> tuple[int, dict[str, Any]]:
    async with house.http.delete(f"{house.url}{PATH}/{pin_id}") as response:
        return response.status, await response.json()


async def listed(house: House) -> list[dict[str, Any]]:
    status, told = await house.get(PATH)
    assert (status, told["object"]) == (200, "list")
    return told["data"]


async def pins_of(house: House, count: int = 1) -> list[Pin]:
    await house.scheduler.until(lambda: len(house.scheduler.of(Pin)) >= count)
    return house.scheduler.of(Pin)


async def test_a_text_is_pinned_and_told_when_it_is_ready(house: House) -> None:
    told = await pin(house, name="story", cache_salt="s")
    (asked,) = house.scheduler.of(Pin)
    assert bytes(asked.token_ids) == b"Once upon a time"
    assert (asked.cache_salt, asked.key_hash) == ("s", b"")
    assert told == {
        "id": asked.pin_id,
        "object": "prefix",
        "created": told["created"],
        "name": "story",
        "num_tokens": 16,
        "num_blocks": 1,
        "status": "ready",
        "hits": 0,
    }
    assert asked.pin_id.startswith("prefix-")


async def test_token_ids_are_pinned_as_they_are(house: House) -> None:
    assert (await pin(house, prompt=[5, 6, 7]))["num_tokens"] == 3
    assert house.scheduler.of(Pin)[0].token_ids == (5, 6, 7)


async def test_a_chat_is_what_a_request_that_goes_on_begins_with(house: House) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    await pin(house, prompt=None, messages=messages)
    await house.post("/v1/chat/completions",
                     messages=[*messages, {"role": "user", "content": "Hi"}])  # fmt: skip
    prefix, prompt = house.scheduler.of(Pin)[0].token_ids, house.scheduler.of(Submit)[0].prompt
    assert prompt[: len(prefix)] == prefix
    assert len(prefix) > 9
    await pin(house, prompt=None, messages=messages, add_generation_prompt=True)
    assert len(house.scheduler.of(Pin)[1].token_ids) > len(prefix)


async def test_the_list_has_them_and_one_is_found_by_its_id(house: House) -> None:
    first, second = await pin(house, name="a"), await pin(house, name="b")
    assert await listed(house) == [first, second]
    assert await house.get(f"{PATH}/{second['id']}") == (200, second)
    status, told = await house.get(f"{PATH}/prefix-none")
    assert (status, told["error"]["code"]) == (404, "prefix_not_found")


async def test_what_is_let_go_is_gone_and_pinned_again_by_nobody(house: House) -> None:
    told = await pin(house)
    assert await delete(house, told["id"]) == (
        200,
        {"id": told["id"], "object": "prefix", "deleted": True},
    )
    assert await listed(house) == []
    status, failed = await delete(house, told["id"])
    assert (status, failed["error"]["code"]) == (404, "prefix_not_found")
    assert house.gateway.link.pins.num_remembered == 0


async def test_keys_see_their_own(tmp_path: Path) -> None:
    async with open_house(tmp_path, api_key=("a", "b")) as house:
        of_key = {}
        for key in "ab":
            headers = {"Authorization": f"Bearer {key}"}
            async with house.http.post(
                house.url + PATH, json={"prompt": key}, headers=headers
            ) as response:
                of_key[key] = await response.json()
        for key in "ab":
            headers = {"Authorization": f"Bearer {key}"}
            async with house.http.get(house.url + PATH, headers=headers) as response:
                assert (await response.json())["data"] == [of_key[key]]
        assert (await house.get(PATH))[0] == 401
        one, other = house.scheduler.of(Pin)
        assert one.key_hash != other.key_hash


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 512]}, "prompt[1]"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "a", "nmae": "b"}, "nmae"),
        ({"prompt": "a", "name": "n" * 129}, "name"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a" * 8192}, "prompt"),
    ],
)
async def test_a_wrong_field_is_named(house: House, fields: dict[str, Any], param: str) -> None:
    status, told = await house.post(PATH, **fields)
    assert (status, told["error"]["param"]) == (400, param), told
    assert not house.scheduler.of(Pin)


async def test_nothing_to_pin_is_told_with_both_ways_to_say_it(house: House) -> None:
    for fields in ({}, {"prompt": None, "name": "a"}, {"messages": None}):
        _, told = await house.post(PATH, **fields)
        assert told["error"]["message"] == "prompt: is required (or messages)"


async def test_an_unknown_id_is_told_alike_by_get_and_delete(house: House) -> None:
    assert await delete(house, "prefix-x") == await house.get(f"{PATH}/prefix-x")


async def test_what_is_over_the_budget_is_refused_and_forgotten(house: House) -> None:
    house.scheduler.pin_refusal = Refused(
        RequestId(""), ErrorCode.PREFIX_BUDGET, "too many blocks", "prompt"
    )
    async with house.http.post(house.url + PATH, json={"prompt": "a"}) as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"]) == (400, "prefix_budget_exceeded")
        assert "Retry-After" not in response.headers
    assert told["message"] == "too many blocks"
    assert house.gateway.link.pins.num_remembered == 0


async def test_what_is_over_the_budget_only_now_is_to_be_tried_again(house: House) -> None:
    house.scheduler.pin_refusal = Refused(
        RequestId(""), ErrorCode.PREFIX_BUDGET, "not beside that request", "prompt", 5.0
    )
    async with house.http.post(house.url + PATH, json={"prompt": "a"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "5")
        assert (await response.json())["error"]["code"] == "prefix_budget_exceeded"
    house.scheduler.pin_refusal = None
    assert (await pin(house, prompt="a"))["status"] == "ready"


async def test_a_prefix_that_takes_long_is_told_while_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_routes, "COMPUTE_S", 0.0)
    async with open_house(tmp_path) as house:
        house.scheduler.holds = True
        told = await pin(house)
        assert (told["status"], told["num_tokens"], told["num_blocks"]) == ("computing", 16, 1)
        assert (await listed(house))[0]["status"] == "computing"


async def test_a_client_that_leaves_leaves_the_prefix_pinned(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.post(PATH, prompt="abc", name="mine"))
    await pins_of(house)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    house.scheduler.holds = False
    assert [(one["name"], one["status"]) for one in await listed(house)] == [("mine", "ready")]
    assert not house.scheduler.of(Unpin)


async def test_another_scheduler_gets_all_prefixes_before_any_request(house: House) -> None:
    told = await pin(house, name="story")
    async with held_stream(house):
        scheduler = await restart(house)
        await scheduler.submitted()
        kinds = [type(one) for one in scheduler.received if isinstance(one, Pin | Submit)]
        assert kinds == [Pin, Submit]
        assert scheduler.of(Pin)[0].pin_id == told["id"]
        scheduler.holds = False
        assert await listed(house) == [told]


async def test_one_deleted_elsewhere_is_not_pinned_again(house: House) -> None:
    told = await pin(house)
    kept = await pin(house, prompt="b")
    house.scheduler.send(Unpinned(RequestId(told["id"])))
    await listed(house)
    await restart(house)
    assert [one.pin_id for one in await pins_of(house)] == [kept["id"]]


async def restart_that_refuses_for_now(house: House, pin_id: RequestId) -> list[tuple[Any, ...]]:
    """A scheduler life that takes a prefix at the third time. Returns: what the log says of it."""
    with structlog.testing.capture_logs() as events:
        scheduler = await restart(house)
        scheduler.holds = False
        scheduler.pin_refusal = Refused(
            RequestId(""), ErrorCode.PREFIX_BUDGET, "not beside that request", None, 0.01
        )
        await pins_of(house, 3)
        scheduler.pin_refusal = None
        await scheduler.until(lambda: pin_id in scheduler.pins)
        assert [one["status"] for one in await listed(house)] == ["ready"]
    return [
        (event["event"], event["log_level"], event["id"], event.get("why"))
        for event in events
        if event["event"].startswith("prefix_")
    ]


async def test_a_prefix_refused_for_now_after_a_restart_is_missed_in_the_log_until_it_is_back(
    house: House,
) -> None:
    pin_id = RequestId((await pin(house))["id"])
    for _ in range(2):
        assert await restart_that_refuses_for_now(house, pin_id) == [
            ("prefix_missed", "warning", pin_id, "not beside that request"),
            ("prefix_pinned_again", "info", pin_id, None),
        ]


async def test_one_refused_for_good_after_a_restart_is_forgotten(house: House) -> None:
    await pin(house)
    scheduler = await restart(house)
    scheduler.pin_refusal = Refused(RequestId(""), ErrorCode.PREFIX_BUDGET, "too small a pool")
    await pins_of(house)
    await listed(house)
    assert house.gateway.link.pins.num_remembered == 0
    assert len(scheduler.of(Pin)) == 1


async def test_what_was_lost_on_the_way_is_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.pins.RESEND_S", 0.0)
    house.scheduler.is_mute = True
    asking = asyncio.create_task(house.get(PATH))
    await house.scheduler.until(lambda: len(house.scheduler.of(ListPins)) > 0)
    house.scheduler.is_mute = False
    assert (await asking)[0] == 200
    assert len(house.scheduler.of(ListPins)) > 1


@pytest.mark.parametrize("path", [PATH, f"{PATH}/{{}}"])
async def test_a_question_that_another_life_answers_too_early_is_asked_again(
    house: House, path: str
) -> None:
    told = await pin(house)
    house.scheduler.begin_again()
    asking = asyncio.create_task(house.get(path.format(told["id"])))
    await house.scheduler.until(lambda: len(house.scheduler.of(ListPins)) == 1)
    assert not house.scheduler.pins  # so the answer had none
    house.scheduler.is_heard_of()
    status, answer = await asking
    assert status == 200
    assert answer == (told if path != PATH else {"object": "list", "data": [told]})
    assert len(house.scheduler.of(ListPins)) == 2


async def test_a_delete_that_another_life_refuses_too_early_is_asked_again(house: House) -> None:
    told = await pin(house)
    house.scheduler.begin_again()
    asking = asyncio.create_task(delete(house, told["id"]))
    await house.scheduler.until(lambda: len(house.scheduler.of(ListPins)) == 1)
    house.scheduler.is_heard_of()
    assert (await asking)[0] == 200
    assert len(house.scheduler.of(Unpin)) == 2
    assert not house.scheduler.pins
    assert house.gateway.link.pins.num_remembered == 0


async def test_a_life_that_lost_a_prefix_is_believed_once_it_has_said_who_it_is(
    house: House,
) -> None:
    told = await pin(house)
    kept = await pin(house, prompt="b")
    del house.scheduler.pins[RequestId(told["id"])]
    assert await listed(house) == [kept]
    assert (await delete(house, told["id"]))[0] == 200  # not to be pinned again
    assert house.gateway.link.pins.num_remembered == 1


async def test_an_answer_to_an_earlier_life_is_no_answer() -> None:
    sent: list[Any] = []
    pins = GatewayPins(lambda message: sent.append(message) or True)
    pins.welcomed(Boot(1))
    asking = asyncio.create_task(pins.list(b""))
    await asyncio.sleep(0)
    pins.welcomed(Boot(2))
    first, second = sent
    pins.heard(Pins(first.query_id, ()))
    there = Pinned(RequestId("prefix-a"), 1, 1, True)
    pins.heard(Pins(second.query_id, (there,)))
    assert await asking == (there,)


async def test_the_list_is_in_order_of_creation_whatever_the_scheduler_says(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((30.0, 10.0, 20.0))
    monkeypatch.setattr(prefix_routes, "now_s", lambda: next(seconds))
    for name in "cab":
        await pin(house, name=name)
    assert "".join([one["name"] for one in await listed(house)]) == "abc"


async def test_without_a_scheduler_it_is_a_503(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as (gateway, http):
        host, port = gateway.address
        url = f"http://{host}:{port}{PATH}"
        async with http.post(url, json={"prompt": "a"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        async with http.get(url) as response:
            assert response.status == 503
        async with http.delete(url + "/prefix-x") as response:
            assert response.status == 503
