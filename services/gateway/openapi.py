"""/openapi.json: what this server takes and answers, made of the models that check and describe it.

What a schema cannot say - rules between fields - is said in descriptions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from services.gateway import answer_models as answers
from services.gateway import bodies
from services.gateway import prefix_models as prefixes
from services.gateway.keys import OPEN_TO_ALL
from services.gateway.openapi_schemas import SCHEMAS, Facts, schemas_of
from shared.version import VERSION

_JSON: Final = "application/json"
_WHY: Final = {
    400: "a field is wrong or not supported, or the request cannot be read",
    401: "no API key, or none that is good",
    404: "no such model, no such prefix, or no such stream",
    408: "the request did not arrive in time, or its deadline_s passed before its answer was whole",
    413: "the body is too large",
    415: "the body is no application/json in UTF-8, plain, gzip or deflate",
    417: "an Expect that is not 100-continue",
    429: "too many requests wait, a prefix finds no room now, or the key's limit is reached",
    500: "the server failed on this request",
    503: "not ready, or no longer",
}
_OF_ALL: Final = (400, 417, 500)
_OF_BODIES: Final = (400, 404, 408, 413, 415, 417, 500)
_OF_PREFIXES: Final = (404, 503)
_OF_GENERATING: Final = (*_OF_BODIES, 429, 503)
_RETRIED: Final = (429, 503)
_REQUEST_ID: Final = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "printable ASCII of up to 128 characters is echoed; else the server makes one",
    "schema": {"type": "string"},
}
_STREAM: Final = (
    "with stream: true, server-sent events: `data:` and an object of the form {chunk}, whose "
    "choices hold what is new, and `data: [DONE]` at the end. An error after the beginning is an "
    "event of the form ErrorAnswer, after all text that came before it. A stream that was cut off "
    "goes on at GET /v1/streams/{{id}}, or if this is sent again with the header Last-Event-ID."
)
_LAST_EVENT: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "the id of the last event that came; without it all of the stream is told",
    "schema": {"type": "string", "pattern": "^(chat)?cmpl-[0-9a-f]{32}:[0-9.te-]{1,64}$"},
}
_NAMES: Final = {
    "/v1/completions": ("createCompletion", "generating"),
    "/v1/chat/completions": ("createChatCompletion", "generating"),
    "/tokenize": ("tokenize", "tokens"),
    "/v1/streams/{id}": ("resumeStream", "generating"),
    "/detokenize": ("detokenize", "tokens"),
    "/v1/models": ("listModels", "models"),
    "/v1/models/{model}": ("retrieveModel", "models"),
    "/version": ("getVersion", "server"),
    "/metrics": ("getMetrics", "server"),
    "/openapi.json": ("getOpenapi", "server"),
    "/health": ("getHealth", "server"),
    "/health/ready": ("getReadiness", "server"),
    "/health/live": ("getLiveness", "server"),
}
"""Each path's one operation, and the group it is shown in."""
_PREFIXES: Final = {
    ("/v1/prefixes", "post"): "pinPrefix",
    ("/v1/prefixes", "get"): "listPrefixes",
    ("/v1/prefixes/{id}", "get"): "retrievePrefix",
    ("/v1/prefixes/{id}", "delete"): "unpinPrefix",
}
"""The operations of paths that have several."""


def document(facts: Facts) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server."""
    paths = _paths()
    for path, operations in paths.items():
        for method, operation in operations.items():
            name, tag = _NAMES.get(path) or (_PREFIXES[path, method], "prefixes")
            operation["operationId"] = name
            operation["tags"] = [tag]
            operation["parameters"] = [*operation.get("parameters", ()), _REQUEST_ID]
            if facts.needs_key and path not in OPEN_TO_ALL:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = _failure(401)
                if method == "post":
                    operation["responses"]["429"] = _failure(429)
    components: dict[str, Any] = {"schemas": schemas_of(facts)}
    if facts.needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Splitflap",
            "version": VERSION,
            "description": (
                "The OpenAI API, with vLLM's names for what goes beyond it. null is absent; a "
                "field that is not here is a 400; 5.0 is no integer and true is no number."
            ),
        },
        "paths": paths,
        "components": components,
    }


# ------------------------------------------------------------------ paths


def _paths() -> dict[str, dict[str, Any]]:
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    model["description"] = "its name, slashes and all"
    one_model = _get("A model", answers.ModelCard, (404,))
    one_model["parameters"] = [model]
    document_form = {"type": "object"}
    prefix_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    one_prefix = _get("A pinned prefix", prefixes.PrefixCard, _OF_PREFIXES)
    unpin = _get("Let a prefix go", prefixes.PrefixDeleted, _OF_PREFIXES)
    for operation in (one_prefix, unpin):
        operation["parameters"] = [prefix_id]
    return {
        "/v1/completions": {
            "post": _generate(
                "Go on with a text",
                bodies.CompletionBody,
                answers.CompletionAnswer,
                answers.CompletionChunk,
            )
        },
        "/v1/chat/completions": {
            "post": _generate(
                "Answer a conversation", bodies.ChatBody, answers.ChatAnswer, answers.ChatChunk
            )
        },
        "/v1/streams/{id}": {"get": _resume()},
        "/tokenize": {
            "post": _post(
                "The tokens of a text or a conversation",
                [bodies.TokenizeTextBody, bodies.TokenizeChatBody],
                _answer(_ref(answers.TokenizeAnswer)),
                _OF_BODIES,
            )
        },
        "/detokenize": {
            "post": _post(
                "The text of tokens",
                [bodies.DetokenizeBody],
                _answer(_ref(answers.DetokenizeAnswer)),
                _OF_BODIES,
            )
        },
        "/v1/prefixes": {
            "post": _post(
                "Pin a prefix: it stays computed for all whose prompt begins with it",
                [prefixes.PrefixTextBody, prefixes.PrefixChatBody],
                _answer(_ref(prefixes.PrefixCard)),
                _OF_GENERATING,
            ),
            "get": _get("The pinned prefixes", prefixes.PrefixList, (503,)),
        },
        "/v1/prefixes/{id}": {"get": one_prefix, "delete": unpin},
        "/v1/models": {"get": _get("The models", answers.ModelList)},
        "/v1/models/{model}": {"get": one_model},
        "/version": {"get": _get("The server's version", answers.VersionAnswer)},
        "/metrics": {"get": _read("For Prometheus", {"text/plain": {"type": "string"}})},
        "/openapi.json": {"get": _read("This document", {_JSON: document_form})},
        "/health": {"get": _ready()},
        "/health/ready": {"get": _ready()},
        "/health/live": {"get": _get("Whether this process answers", answers.Live)},
    }


def _generate(
    summary: str, asked: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel]
) -> dict[str, Any]:
    told = _answer(_ref(answer))
    told["description"] = f"the answer; {_STREAM.format(chunk=chunk.__name__)}"
    schema = {"type": "string", "description": f"events of the form {SCHEMAS}{chunk.__name__}"}
    told["content"]["text/event-stream"] = {"schema": schema}
    return _post(summary, [asked], told, _OF_GENERATING)


def _resume() -> dict[str, Any]:
    schema = {"type": "string", "description": "events, as they would have come"}
    operation = _read(
        "Go on with a stream that was cut off",
        {"text/event-stream": {"schema": schema}},
        (404, 503),
    )
    operation["description"] = (
        "What comes after the event that Last-Event-ID names, text and all else as it would have "
        "come; the id is that of the stream's objects, and the API key the same. A stream whose "
        "client left is kept, if that asked for it (stream_options.resumable) or was slow, or if "
        "its gateway left or died; for how long, the error says that one gets without."
    )
    stream_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    operation["parameters"] = [stream_id, _LAST_EVENT]
    return operation


def _post(
    summary: str, asked: Sequence[type[BaseModel]], told: dict[str, Any], failing: Sequence[int]
) -> dict[str, Any]:
    refs = [_ref(body) for body in asked]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
        "responses": {"200": told, **_failures(failing)},
    }


def _get(summary: str, answer: type[BaseModel], failing: Sequence[int] = ()) -> dict[str, Any]:
    return _read(summary, {_JSON: _ref(answer)}, failing)


def _read(summary: str, content: Mapping[str, Any], failing: Sequence[int] = ()) -> dict[str, Any]:
    told = _with_request_id("the answer")
    told["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    return {"summary": summary, "responses": {"200": told, **_failures((*_OF_ALL, *failing))}}


def _ready() -> dict[str, Any]:
    operation = _get("Whether requests are taken, and what is missing", answers.Ready)
    operation["responses"]["503"] = _answer(_ref(answers.NotReady), 503)
    return operation


# ------------------------------------------------------------------ answers


def _failures(statuses: Sequence[int]) -> dict[str, Any]:
    return {str(status): _failure(status) for status in sorted(statuses)}


def _failure(status: int) -> dict[str, Any]:
    told = _answer(_ref(answers.ErrorAnswer), status)
    if status == 401:
        told["headers"]["WWW-Authenticate"] = {"schema": {"const": "Bearer"}, "required": True}
    return told


def _answer(schema: dict[str, Any], status: int = 200) -> dict[str, Any]:
    told = _with_request_id(_WHY.get(status, "the answer"))
    if status in _RETRIED:
        told["headers"]["Retry-After"] = {
            "description": "seconds",
            "schema": {"type": "integer", "minimum": 1},
            "required": True,
        }
    told["content"] = {_JSON: {"schema": schema}}
    return told


def _with_request_id(description: str) -> dict[str, Any]:
    header = {
        "description": "the client's, or one of the server's",
        "schema": {"type": "string"},
    }
    return {"description": description, "headers": {"X-Request-Id": header}}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": SCHEMAS + model.__name__}
