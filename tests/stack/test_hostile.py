"""Whatever is sent to whatever endpoint: an answer in OpenAI's form, and nothing else is disturbed.

The endpoints and their fields are read off the server's own /openapi.json, so that a new field is
tried without a word here.
"""

import http.client
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import many_cases
from tests.stack.client import complete
from tests.stack.stack import events, fetch, start, until

pytestmark = [pytest.mark.stack, pytest.mark.fuzz]

WITNESS = {"prompt": "the witness", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
BASES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("hostile"), "--model", "toy", "--max-model-len", "256",
        "--num-gpu-blocks-override", "64", "--request-read-timeout-s", "2", "--log-level", "error",
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def fields(toy):
    """{path: [names of the fields of its body]}, as the server itself tells them."""
    told = json.loads(fetch(toy.url + "/openapi.json")[1])

    def resolved(schema):
        if "$ref" in schema:
            return resolved(told["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
        return schema

    found = {}
    for path, operations in told["paths"].items():
        if "post" in operations:
            body = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            options = [resolved(option) for option in body.get("anyOf", [body])]
            found[path] = sorted({name for option in options for name in option["properties"]})
    return found


@pytest.fixture(scope="module")
def witness(toy):
    """What the server says when all is well; it must say so to the end."""
    before = complete(toy, **WITNESS)["choices"][0]["text"]
    blocks = toy.unheld()
    children = {name: child.pid for name, child in toy.children().items()}
    yield
    until(toy.is_idle, "nothing is left of any request")
    assert toy.unheld() == blocks
    assert {name: child.pid for name, child in toy.children().items()} == children
    assert complete(toy, **WITNESS)["choices"][0]["text"] == before


JSON = "application/json"
LATIN_1 = st.characters(codec="latin-1", exclude_categories=["Cc"])
NUMBERS = st.one_of(
    st.integers(-3, 300), st.integers(), st.floats(), st.sampled_from([2**31, -(2**63), 10**400]),
    st.floats(0, 1),
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=20), st.text(st.characters(), max_size=200),
    st.sampled_from(["", "toy", "\0", "user", "😀" * 50, "\ud800", "auto", "text"]),
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
IDS = st.lists(st.integers(0, 511), max_size=40)
LIKELY = st.one_of(
    st.booleans(), st.integers(0, 25), st.floats(-2, 2), st.text(max_size=9), IDS,
    st.lists(IDS, max_size=4), st.lists(st.text(max_size=8), max_size=4),
    st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=5),
    st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
            optional={"content": st.text(max_size=9) | st.lists(ANYTHING, max_size=2)},
        ),
        max_size=4,
    ),
)  # fmt: skip


@st.composite
def bodies(draw, fields):
    """(path, body): mostly right, with some fields of any kind."""
    path = draw(st.sampled_from(sorted(BASES)))
    names = draw(st.lists(st.sampled_from(fields[path]) | st.text(max_size=8), max_size=5))
    body = dict(BASES[path]) if draw(st.integers(0, 5)) else {}
    for name in names:
        body[name] = draw(LIKELY | ANYTHING)
    return path, body


def sent(toy, path, raw, headers):
    """(status, content type, text) over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", toy.port, timeout=60)
    try:
        connection.request("POST", path, raw, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"] or "", answer.read().decode()
    finally:
        connection.close()


def check_answer(status, content_type, text):
    """It is whole, in one of the forms there are, and no fault of the server's."""
    assert status < 500, text
    if content_type.startswith("text/event-stream"):
        assert status == 200
        *chunks, end = events(text)
        assert end == "[DONE]"
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    else:
        told = json.loads(text)
        errors = [told["error"]] if status >= 400 else []
    for error in errors:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"] not in ("internal_error", "service_unavailable"), error


def test_bodies_of_every_kind(toy, fields, witness):
    statuses = set()

    @many_cases
    @given(bodies(fields))
    def one(case):
        path, body = case
        raw = json.dumps(body).encode("utf-8", "surrogatepass")
        answer = sent(toy, path, raw, {"Content-Type": JSON})
        check_answer(*answer)
        statuses.add(answer[0])

    one()
    assert {200, 400} <= statuses


def test_bytes_of_every_kind(toy, witness):
    whole = [json.dumps(body).encode() for body in BASES.values()]
    headers = st.fixed_dictionaries(
        {"Content-Type": st.sampled_from([JSON, "text/plain", "", JSON + "; charset=x"])},
        optional={
            "Content-Encoding": st.sampled_from(["gzip", "deflate", "br", "identity", "x"]),
            "Expect": st.sampled_from(["100-continue", "x"]),
            "Accept": st.text(LATIN_1, max_size=9),
            "X-Request-Id": st.text(LATIN_1, max_size=200),
            "Authorization": st.sampled_from(["Bearer x", "Basic eA==", ""]),
        },
    )  # fmt: skip

    @st.composite
    def broken(draw):
        raw = bytearray(draw(st.sampled_from(whole)))
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, len(raw)))
            raw[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
        return bytes(raw)

    @many_cases
    @given(st.sampled_from(sorted(BASES)), broken() | st.binary(max_size=99), headers)
    def one(path, raw, headers):
        head = {name: value.encode("latin-1") for name, value in headers.items()}
        check_answer(*sent(toy, path, raw, head))

    one()
