"""Bodies of a legal size that would cost seconds or gigabytes: refused before they do."""

import json
import resource
import threading
import time

import pytest

from services.gateway import openai
from services.gateway.request_body import MAX_VALUES, MalformedBody, parse_object
from shared.errors import RequestError
from shared.settings import GatewaySettings
from tests.gateway.house import House

MOST_BYTES = GatewaySettings.model_fields["max_body_bytes"].default
MANY = MOST_BYTES // 12 - 10


def names(count: int) -> str:
    return ",".join([f'"{number:07x}":1' for number in range(count)])


COSTLY = {
    "names given twice": "{" + names(60_000) + ',"0000000":1}',
    "stop_token_ids": '{"prompt":"a","stop_token_ids":[' + "0," * (MOST_BYTES // 2 - 50) + "0]}",
    "lists in stop": '{"prompt":"a","stop":[' + "[]," * (MOST_BYTES // 3 - 50) + "[]]}",
    "a few lists in stop": '{"prompt":"a","stop":[' + "[]," * 90_000 + "[]]}",
    "stop strings": '{"prompt":"a","stop":[' + '"a",' * 90_000 + '"a"]}',
    "unknown names": '{"prompt":"a",' + names(MANY) + "}",
    "fewer unknown names": '{"prompt":"a",' + names(90_000) + "}",
    "messages": '{"messages":[' + "{}," * (MOST_BYTES // 3 - 50) + "{}]}",
    "fewer messages": '{"messages":[' + '{"role":"user","content":5,"a":1},' * 4095 + "{}]}",
    "a message's unknown names": '{"messages":[{' + names(90_000) + "}]}",
    "metadata": '{"prompt":"a","metadata":{' + names(90_000) + "}}",
    "a long name around many": '{"' + "x" * 2_000_000 + '":[' + '"\\ud83d",' * 90_000 + "1]}",
    "a string that never ends": '{"prompt":"' + "," * MAX_VALUES + '\\"' * 1_900_000,
    "brackets": "[" * MOST_BYTES,
    "token ids and a mistake": '{"prompt":[' + "7," * 250_000 + "true]}",
    "lists of one token id and a mistake": '{"prompt":[' + "[7]," * 1000 + "[[]]]}",
    "texts by the thousand": '{"prompt":[' + '"a",' * 200_000 + '"a"]}',
    "prompts of all kinds": '{"prompt":[' + '"a",7,[7],' * 60_000 + "{}]}",
    "biases": '{"prompt":"a","logit_bias":{' + names(90_000) + "}}",
    "biases of a wrong type": '{"prompt":"a","logit_bias":{'
    + names(1000).replace(":1", ":[]")
    + "}}",
    "allowed tokens": '{"prompt":"a","allowed_token_ids":[' + "[]," * 90_000 + "[]]}",
    "bad words": '{"prompt":"a","bad_words":[' + "[]," * 90_000 + "[]]}",
    "parts": '{"messages":[{"role":"user","content":[' + "{}," * 100_000 + "{}]}]}",
    "parts with a mistake at the end": '{"messages":[{"role":"user","content":['
    + '{"type":"text","text":""},' * 80_000
    + "5]}]}",
}


@pytest.mark.parametrize("body", COSTLY.values(), ids=list(COSTLY))
def test_a_costly_body_is_refused_in_no_time(body: str) -> None:
    """Seconds and gigabytes each, before; limits here are generous: this machine may be busy."""
    sent = body.encode()
    assert len(sent) <= MOST_BYTES
    parse = openai.parse_chat if "messages" in body[:12] else openai.parse_completion
    peak_kib, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(RequestError) as caught:
        parse(parse_object(sent))
    assert time.thread_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 150 * 1024
    assert len(caught.value.message) < 250
    assert len(caught.value.param or "") < 120


@pytest.mark.parametrize("inside", ["0", "[]", "{}", '""', '{"a":"b"}'])
def test_values_are_counted(inside: str) -> None:
    def listing(count: int) -> bytes:
        return ('{"a":[' + ",".join([inside] * count) + "]}").encode()

    each = 2 if inside == '{"a":"b"}' or inside in ("[]", "{}") else 1
    assert parse_object(listing((MAX_VALUES - 10) // each))
    with pytest.raises(MalformedBody, match="too many values"):
        parse_object(listing(MAX_VALUES))


@pytest.mark.parametrize("text", [", ", "[", '"', "\\", '\\",[', "{ ü"])
def test_a_long_text_is_one_value(text: str) -> None:
    prompt = text * 300_000
    assert parse_object(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


def test_as_many_token_ids_as_a_body_holds_are_read_in_no_time() -> None:
    body = ('{"prompt":[[' + "7," * 130_000 + "7],[" + "8," * 130_000 + "8]]}").encode()
    began = time.thread_time()
    call = openai.parse_completion(parse_object(body))
    assert time.thread_time() - began < 0.5
    assert [len(prompt) for prompt in call.prompts] == [130_001, 130_001]


async def test_a_large_body_is_read_beside_the_event_loop(house: House, monkeypatch) -> None:
    readers = []

    def watched(body: bytes):
        readers.append(threading.current_thread())
        return parse_object(body)

    monkeypatch.setattr("services.gateway.request_reading.parse_object", watched)
    await house.post("/v1/completions", prompt="x")
    await house.post("/v1/completions", prompt="x" * 2**17)
    assert readers[0] is threading.current_thread()
    assert readers[1] is not threading.current_thread()
