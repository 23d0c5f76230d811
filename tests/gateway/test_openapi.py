"""/openapi.json: whole, well-formed, and with this server's own limits in it.

That it is true is asked of the real processes (tests/stack/test_openapi.py).
"""

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from services.gateway.bodies import ChatBody, CompletionBody
from tests.gateway.house import House, open_gateway, open_house

PATHS = {
    "/v1/completions": "post",
    "/v1/chat/completions": "post",
    "/v1/streams/{id}": "get",
    "/tokenize": "post",
    "/detokenize": "post",
    "/v1/prefixes": "post",
    "/v1/prefixes/{id}": "get",
    "/v1/models": "get",
    "/v1/models/{model}": "get",
    "/version": "get",
    "/metrics": "get",
    "/openapi.json": "get",
    "/health": "get",
    "/health/ready": "get",
    "/health/live": "get",
}


async def document(house: House) -> dict[str, Any]:
    status, told = await house.get("/openapi.json")
    assert status == 200
    return told


def refs(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*[refs(item) for item in node.values()])
    return set().union(*[refs(item) for item in node]) if isinstance(node, list) else set()


async def test_every_path_is_there_and_answers(house: House) -> None:
    told = await document(house)
    assert {path: next(iter(item)) for path, item in told["paths"].items()} == PATHS
    for path, method in PATHS.items():
        url = house.url + path.format(model="toy", id="prefix-none")
        async with house.http.request(method, url) as response:
            described = told["paths"][path][method]["responses"]
            assert str(response.status) in described
            assert response.content_type in described[str(response.status)]["content"]
            assert response.headers["X-Request-Id"]


async def test_all_its_schemas_are_schemas_and_all_references_lead_somewhere(house: House) -> None:
    told = await document(house)
    schemas = told["components"]["schemas"]
    assert {f"#/components/schemas/{name}" for name in schemas} >= refs(told)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody], ids=lambda body: body.__name__)
async def test_every_field_is_described(house: House, body) -> None:
    schema = (await document(house))["components"]["schemas"][body.__name__]
    assert schema["additionalProperties"] is False
    assert body.model_fields.keys() <= schema["properties"].keys()
    assert schema["properties"]["store"]["enum"] == [False, None]
    assert schema["properties"]["functions"]["type"] == "null"
    assert schema["properties"]["functions"]["deprecated"] is True
    assert all(
        field["description"] for field in schema["properties"].values() if "$ref" not in field
    )


async def test_a_limit_is_told_once(house: House) -> None:
    for schema in (await document(house))["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if "anyOf" in field:
                assert field.keys() <= {"anyOf", "description", "default", "enum"}, name


async def test_a_message_and_stream_options_have_their_own_other_fields(house: House) -> None:
    schemas = (await document(house))["components"]["schemas"]
    options, message = (
        schemas[name]["properties"] for name in ("StreamOptionsBody", "MessageBody")
    )
    assert options.keys() == {
        "include_usage", "continuous_usage_stats", "include_obfuscation", "resumable"
    }  # fmt: skip
    assert {"tool_calls", "annotations", "type"} < message.keys()
    assert "include_obfuscation" not in message


async def test_operations_have_names_and_groups(house: House) -> None:
    told = await document(house)
    operations = [told["paths"][path][method] for path, method in PATHS.items()]
    assert len({operation["operationId"] for operation in operations}) == len(PATHS)
    assert all(len(operation["tags"]) == 1 for operation in operations)


STREAMED = [
    ("/v1/completions", "CompletionChunk", {"prompt": "Hi", "logprobs": 2}),
    ("/v1/completions", "CompletionChunk", {"prompt": "Hi", "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", "ChatChunk", {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", "ChatChunk", {"return_token_ids": True}),
]


@pytest.mark.parametrize(("path", "name", "fields"), STREAMED, ids=repr)
async def test_events_have_the_form_that_is_told(house: House, path, name, fields) -> None:
    schemas = (await document(house))["components"]["schemas"]
    form = jsonschema_rs.validator_for(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    )
    if "chat" in path:
        fields = {**fields, "messages": [{"role": "user", "content": "Hi"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with house.stream(path, **fields, stream_options=options) as events:
        *chunks, done = await events.rest()
    assert done == "[DONE]"
    assert len(chunks) > 2
    for chunk in chunks:
        form.validate(chunk)


async def test_the_limits_are_this_servers(tmp_path: Path) -> None:
    options = {"max_model_len": 100, "vocab": 300}
    async with open_house(tmp_path, scheduler_options=options) as house:
        fields = (await document(house))["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["max_completion_tokens"]["anyOf"][0]["maximum"] == 99
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 299
    assert fields["model"]["enum"] == ["toy", None]


async def test_it_is_there_before_anything_else(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as (gateway, http):
        url = "http://{}:{}/openapi.json".format(*gateway.address)
        async with http.get(url) as response:
            told = await response.json()
    fields = told["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["allowed_token_ids"]["anyOf"][0]["items"]["maximum"] == 257


async def test_keys_are_told_of_where_there_are_some(house: House, tmp_path: Path) -> None:
    assert "securitySchemes" not in (await document(house))["components"]
    (tmp_path / "locked").mkdir()
    async with open_house(tmp_path / "locked", api_key=("sk-x",)) as locked:
        headers = {"Authorization": "Bearer sk-x"}
        async with locked.http.get(locked.url + "/openapi.json", headers=headers) as response:
            told = await response.json()
    assert told["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    for path, method in PATHS.items():
        operation = told["paths"][path][method]
        assert ("401" in operation["responses"]) == (not path.startswith("/health"))
        assert ("security" in operation) == (not path.startswith("/health"))
