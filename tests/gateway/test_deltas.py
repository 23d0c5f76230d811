"""Deltas joined are the whole answer, byte for byte: any text, any portions, any losses."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.event_id import Place, read_event_id
from services.gateway.tokenizer import Tokenizer, ToyTokenizer, load_tokenizer
from shared.model_source import find_model
from tests.gateway.scripted_scheduler import EOS
from tests.gateway.telling import (
    Delivery,
    Telling,
    Told,
    call_of,
    every_token,
    prompt_of,
    stumbling,
)
from tests.gateway.test_stop_strings import expected

PROMPTS = [
    json.loads(line)
    for line in Path("tests/data/smollm2_prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
TOY = ToyTokenizer()
CHARACTERS = st.text("ab\n世é😀", max_size=30)
STOPS = st.lists(st.text("ab\n世é", min_size=1, max_size=4), max_size=3)


def whole_text(tokenizer: Tokenizer, token_ids: Any) -> str:
    return b"".join(tokenizer.bytes_of(i) for i in token_ids if i != EOS).decode(errors="replace")


def check(told: Told, whole: dict[str, Any], num_prompt_tokens: int, index: int = 0) -> None:
    """What a stream tells of a choice is what the answer in one piece tells, at every event."""
    (choice,) = [c for c in whole["choices"] if c["index"] == index]
    is_chat = "message" in choice
    assert told.text(index) == (choice["message"]["content"] if is_chat else choice["text"])
    assert told.token_ids(index) == choice["token_ids"]
    ends = [c for c in told.choices(index) if c["finish_reason"] is not None]
    assert [(e["finish_reason"], e["stop_reason"]) for e in ends] == [
        (choice["finish_reason"], choice["stop_reason"])
    ]
    assert ends[0] is told.choices(index)[-1]
    if choice["logprobs"] is not None:
        joined = told.logprobs(index)
        assert joined == {**choice["logprobs"], **({"refusal": []} if is_chat else {})}
    count = 0
    for event_id, chunk in told.frames:
        for part in chunk["choices"]:
            if part["index"] == index:
                count += len(part.get("token_ids", ()))
        if part_of := _place(event_id, index):
            is_held_back = choice["logprobs"] is not None and not part_of.has_text
            assert part_of.num_tokens == count or (is_held_back and part_of.num_tokens > count)
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == num_prompt_tokens
        assert usage["total_tokens"] == num_prompt_tokens + usage["completion_tokens"]
        if len(whole["choices"]) == 1:
            assert usage["completion_tokens"] == count, "usage is what was delivered so far"
    assert told.frames[-1][1]["usage"] == whole["usage"]
    assert [chunk["choices"] == [] for _, chunk in told.frames].count(True) == 1


def _place(event_id: str, index: int) -> Place | None:
    """What an event's id says of a choice; the last one says that all is told."""
    read = read_event_id(event_id)
    assert read is not None
    assert read[1].is_done or read[1].places
    return None if read[1].is_done else read[1].places[index]


def both(token_ids: Any, delivery: Delivery, interval: int = 1, **fields: Any) -> tuple[Told, Any]:
    told = Telling(call_of(**fields), stream_interval=interval).as_stream([delivery])
    whole = Telling(call_of(**fields)).in_one_piece([Delivery(token_ids)])
    check(told, whole, 2)
    return told, whole["choices"][0]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["lang"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_every_script_comes_out_as_it_went_in(prompt, logprobs) -> None:
    text = prompt["text"]
    dice = random.Random(text)
    ids = tuple(text.encode())
    for interval in (1, 3, 1000):
        stop = [text[at : at + dice.randrange(1, 6)] for at in (len(text) // 2, len(text) - 2)]
        stop = [string for string in stop if string]
        for stops in ([], ["never in a text"], stop):
            told, choice = both(ids, stumbling(ids, dice), interval, logprobs=logprobs, stop=stops)
            assert told.text() == choice["text"] == expected(stops, text)[0]


@settings(max_examples=300, deadline=None)
@given(
    text=CHARACTERS,
    raw=st.binary(max_size=4),
    stops=STOPS,
    includes=st.booleans(),
    interval=st.integers(1, 12),
    endpoint=st.sampled_from(["completion", "chat"]),
    logprobs=st.none() | st.integers(0, 3),
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=12),
    has_eos=st.booleans(),
)
def test_no_portions_and_no_losses_show(
    text, raw, stops, includes, interval, endpoint, logprobs, runs, has_eos
) -> None:
    ids = [*text.encode(), *raw, *([EOS] if has_eos else [])]
    fields = {"endpoint": endpoint, "logprobs": logprobs, "stop": stops}
    told, choice = both(
        ids, Delivery(ids, runs), interval, include_stop_str_in_output=includes, **fields
    )
    kept, matched = expected(stops, whole_text(TOY, ids))
    assert told.text() == kept + (matched if includes and matched else "")
    assert choice["stop_reason"] == matched
    if logprobs is not None:
        check_logprobs(choice, logprobs)
        if endpoint == "completion" and ids:
            assert choice["logprobs"]["text_offset"] == begins_of(choice)


def begins_of(choice: dict[str, Any]) -> list[int]:
    """Where each byte's character stands in the text of all of them, or the text's end.

    U+FFFD stands where bytes are no character.
    """
    raw, begins = b"", []
    for token_id in choice["token_ids"]:
        ends = token_id == EOS
        raw += b"" if ends else bytes([token_id])
        begins.append(len(raw.decode(errors="replace")) - (not ends))
    return [min(begin, len(choice["text"])) for begin in begins]


def check_logprobs(choice: dict[str, Any], num_top: int) -> None:
    ids = choice["token_ids"]
    if not ids:
        assert choice["logprobs"] is None
    elif "message" in choice:
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(ids)
        assert all(len(entry["top_logprobs"]) == num_top for entry in entries)
        assert [bytes(entry["bytes"]) for entry in entries] == [TOY.bytes_of(i) for i in ids]
    else:
        told = choice["logprobs"]
        assert {len(told[name]) for name in told} == {len(ids)}
        assert all(logprob >= -9999.0 for logprob in told["token_logprobs"])
        offsets = told["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(choice["text"])


@given(text=CHARACTERS, interval=st.integers(1, 9), stops=STOPS, cuts=st.lists(st.integers(1, 9)))
def test_an_interval_is_kept_but_by_the_first_and_the_last(text, interval, stops, cuts) -> None:
    ids = tuple(text.encode())
    runs, at = [], 0
    for cut in cuts:
        runs.append((at, cut))
        at += cut
    telling = Telling(call_of(stop=stops), stream_interval=interval)
    *spoken, end = telling.as_stream([Delivery(ids, runs)]).choices()
    assert end["text"] == ""
    for choice in spoken[1:-1]:
        assert len(choice["token_ids"]) >= interval
    assert all(choice["text"] for choice in spoken), "no event for nothing"


@given(text=CHARACTERS)
def test_without_stop_strings_offsets_are_where_each_token_begins(text: str) -> None:
    ids = tuple(text.encode())
    _, choice = both(ids, every_token(ids), logprobs=0)
    if ids:
        begins = [len(text.encode()[:at].decode(errors="ignore")) for at in range(len(ids))]
        assert choice["logprobs"]["text_offset"] == begins


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("raw", "stop", "offsets"),
    [
        (b"a.\n\nThe end", ".\n\nThe@@", list(range(11))),
        (b"ab.\n\nEND..", "\nEND", [0, 1, 2, 3, 4, 4, 4, 4]),
        (b"\xe4x\xe4\xb8y", "never", [0, 1, 2, 2, 3]),
        (b"a\xf0\x9f", "never", [0, 1, 1]),
        ((97, 0xE4, EOS), "never", [0, 1, 2]),
    ],
)
def test_tokens_begin_where_their_text_does(raw, stop, offsets, interval) -> None:
    ids = tuple(raw)
    told, choice = both(ids, every_token(ids), interval, logprobs=0, stop=[stop])
    assert choice["logprobs"]["text_offset"] == offsets
    assert told.logprobs()["text_offset"] == offsets


def test_tokens_that_are_held_back_are_told_with_their_text() -> None:
    ids = tuple(b"ab.\n!")
    told, _ = both(ids, every_token(ids), logprobs=0, stop=[".\n\n"])
    assert [(c["text"], bytes(c["token_ids"])) for c in told.choices()] == [
        ("a", b"a"),
        ("b", b"b"),
        (".\n!", b".\n!"),
        ("", b""),
    ]


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stop_token_is_text_if_the_stop_is_to_be_included(endpoint, logprobs) -> None:
    """As in vLLM: what a client names is kept; the model's own end is no text."""
    ids = tuple(b"ab!")
    for includes in (True, False):
        call = call_of(endpoint, logprobs, include_stop_str_in_output=includes)
        call = replace(call, sampling=replace(call.sampling, stop_token_ids=(ord("!"),)))
        delivery = Delivery(ids, [(0, 1), (1, 2)], stop_token_id=ord("!"))
        told = Telling(call).as_stream([delivery])
        whole = Telling(call).in_one_piece([delivery])
        check(told, whole, 2)
        assert told.text() == ("ab!" if includes else "ab")
        choice = whole["choices"][0]
        assert (choice["stop_reason"], choice["finish_reason"]) == (ord("!"), "stop")
        if endpoint == "completion" and logprobs is not None:
            assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_the_usage_of_a_stream_is_of_what_all_events_have_told() -> None:
    """Not of what has come: with an interval some tokens wait."""
    deliveries = [every_token(b"abcdefg"), every_token(b"vwxyz")]
    prompts = [prompt_of("a"), prompt_of("b")]
    told = Telling(call_of(), prompts, stream_interval=3).as_stream(deliveries)
    count = 0
    for _, chunk in told.frames:
        count += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == count
    assert count == 12


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.tuples(CHARACTERS, st.integers(0, 99)), min_size=2, max_size=6),
    stops=STOPS,
    interval=st.integers(1, 4),
)
def test_several_prompts_do_not_mix(texts, stops, interval) -> None:
    ids = [tuple(text.encode()) for text, _ in texts]
    call = call_of(logprobs=1, stop=stops)
    prompts = [prompt_of(f"prompt {number}") for number in range(len(texts))]
    deliveries = [
        stumbling(one, random.Random(seed)) for one, (_, seed) in zip(ids, texts, strict=True)
    ]
    told = Telling(call, prompts, stream_interval=interval).as_stream(deliveries)
    whole = Telling(call, prompts).in_one_piece([Delivery(one) for one in ids])
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    count = sum(len(prompt.token_ids) for prompt in prompts)
    for index, (text, _) in enumerate(texts):
        check(told, whole, count, index)
        assert told.text(index) == expected(stops, text)[0]


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.tuples(CHARACTERS, st.integers(0, 99)), min_size=6, max_size=6),
    n=st.sampled_from([2, 3, 6]),
    endpoint=st.sampled_from(["completion", "chat"]),
    logprobs=st.none() | st.integers(0, 2),
    stops=STOPS,
    interval=st.integers(1, 4),
    echo=st.booleans(),
)
def test_several_answers_to_a_prompt_do_not_mix(
    texts, n, endpoint, logprobs, stops, interval, echo
) -> None:
    """Choice i of prompt p is the choice p * n + i; a chat has one prompt."""
    texts = texts[:n] if endpoint == "chat" else texts
    ids = [tuple(text.encode()) for text, _ in texts]
    prompts = [prompt_of(f"prompt {number}") for number in range(len(texts) // n)]
    echo = echo and endpoint == "completion"
    call = call_of(endpoint, logprobs, stops, n, echo=echo)
    deliveries = [
        stumbling(one, random.Random(seed)) for one, (_, seed) in zip(ids, texts, strict=True)
    ]
    told = Telling(call, prompts, stream_interval=interval).as_stream(deliveries)
    whole = Telling(call, prompts).in_one_piece([Delivery(one) for one in ids])
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    count = sum(len(prompt.token_ids) for prompt in prompts)
    for index, (text, _) in enumerate(texts):
        check(told, whole, count, index)
        before = prompts[index // n].text if echo else ""
        assert told.text(index) == before + expected(stops, text)[0]
    if endpoint == "chat":
        roles = [c["index"] for _, f in told.frames for c in f["choices"] if "role" in c["delta"]]
        assert roles == list(range(n)), "each choice opens with its role, once"


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_the_real_vocabulary_too(smollm2, data) -> None:
    ids = data.draw(
        st.sampled_from([tuple(prompt["ids"]) for prompt in PROMPTS])
        | st.lists(st.integers(0, 49_151), max_size=30).map(tuple)
    )
    dice = random.Random(data.draw(st.integers(0, 99)))
    text = whole_text(smollm2, ids)
    stops = data.draw(st.just([]) | st.just([text[len(text) // 2 :][:3] or "x"]))
    call = call_of(logprobs=2, stop=stops)
    stream = Telling(call, tokenizer=smollm2, stream_interval=dice.randrange(1, 5))
    told = stream.as_stream([stumbling(ids, dice)])
    whole = Telling(call, tokenizer=smollm2).in_one_piece([Delivery(ids)])
    check(told, whole, 2)
    assert told.text() == expected(stops, text)[0]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(find_model("smollm2-135m-instruct"))
