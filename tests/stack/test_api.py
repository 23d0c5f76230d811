"""The completions API as its clients use it; the same tests on the toy and on the real model."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.stack.client import post
from tests.stack.stack import events, start, until

pytestmark = pytest.mark.stack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The quick brown fox"
LONGEST = 512


@pytest.fixture(
    scope="module", params=["toy", pytest.param("smollm2-135m-instruct", marks=pytest.mark.model)]
)
def server(request, tmp_path_factory):
    exact = [] if request.param == "toy" else ["--dtype", "float32"]
    stack = start(
        tmp_path_factory.mktemp("api"), "--model", request.param, *exact,
        "--num-gpu-blocks-override", "128", "--max-model-len", str(LONGEST),
    )  # fmt: skip
    yield stack
    until(stack.is_idle, "no request is left, no block is lost")
    stack.stop()


# --------------------------------------------------------------------------- asking


def completion(server, **wish):
    """A whole completion; the official client's type takes it."""
    wish = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, **wish}
    answer = answered(server, COMPLETIONS, wish)
    Completion.model_validate(with_numbers(answer))
    return answer


def chat(server, *messages, **wish):
    """A whole chat answer; a string is what the user says."""
    wish = {"messages": said(messages), "max_tokens": 12, "temperature": 0, **wish}
    answer = answered(server, CHAT, wish)
    ChatCompletion.model_validate(answer)
    return answer


def completion_chunks(server, **wish):
    """A streamed completion."""
    wish = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, **wish}
    chunks = streamed(server, COMPLETIONS, wish)
    for chunk in chunks:
        # The client's type is that of whole answers, where a reason is never null.
        whole = [{**choice, "finish_reason": "stop"} for choice in chunk["choices"]]
        Completion.model_validate(with_numbers({**chunk, "choices": whole}))
    return chunks


def chat_chunks(server, *messages, **wish):
    """A streamed chat answer."""
    wish = {"messages": said(messages), "max_tokens": 12, "temperature": 0, **wish}
    chunks = streamed(server, CHAT, wish)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def with_numbers(answer):
    """`answer` as the client's type wants it, which forgets that a text's first token has none."""
    told = json.loads(json.dumps(answer))
    for choice in told["choices"]:
        if probs := choice["logprobs"]:
            probs["token_logprobs"][:1] = [v or 0.0 for v in probs["token_logprobs"][:1]]
            probs["top_logprobs"][:1] = [v or {} for v in probs["top_logprobs"][:1]]
    return told


def said(messages):
    turns = messages or ("Say something.",)
    return [{"role": "user", "content": m} if isinstance(m, str) else m for m in turns]


def answered(server, path, wish):
    status, _, text = post(server, path, wish)
    assert status == 200, text
    return json.loads(text)


def streamed(server, path, wish):
    """The chunks of a stream that ends as it should."""
    status, headers, text = post(server, path, {**wish, "stream": True})
    assert status == 200, text
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *chunks, end = events(text)
    assert end == "[DONE]"
    assert all("error" not in chunk for chunk in chunks), chunks
    return chunks


def refused(server, path, **wish):
    """(status, error) of a request that is not taken."""
    status, _, text = post(server, path, wish)
    assert 400 <= status < 500, text
    return status, json.loads(text)["error"]


def text_of(chunks, index=0):
    """The deltas of one choice, joined."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def ids_of(server, text):
    return answered(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


# --------------------------------------------------------------------------- prompts


def test_a_list_of_prompts_is_answered_in_its_order(server):
    texts = ["One", "Two dogs", "Three cats are"]
    solo = [completion(server, prompt=text) for text in texts]
    answer = completion(server, prompt=texts)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [c["text"] for c in answer["choices"]] == [a["choices"][0]["text"] for a in solo]
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][name] == sum(a["usage"][name] for a in solo)
    chunks = completion_chunks(server, prompt=texts)
    for index, choice in enumerate(answer["choices"]):
        assert text_of(chunks, index) == choice["text"]


def test_token_ids_are_a_prompt_like_their_text(server):
    whole = completion(server, return_token_ids=True)["choices"][0]
    ids = whole["prompt_token_ids"]
    by_ids = completion(server, prompt=ids)["choices"][0]
    by_lists = completion(server, prompt=[ids, ids])["choices"]
    assert [by_ids["text"], *[c["text"] for c in by_lists]] == [whole["text"]] * 3


def test_a_prompt_that_does_not_fit_is_named_and_none_of_the_list_runs(server):
    before = server.metrics()["generation_tokens_total"]
    long = [1] * (LONGEST + 1)
    status, error = refused(server, COMPLETIONS, prompt=[[1, 2], long], max_tokens=4)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt[1]")
    assert str(LONGEST) in error["message"]
    assert str(LONGEST + 1) in error["message"]
    assert server.metrics()["generation_tokens_total"] == before


def test_echo_without_tokens_is_the_prompt_itself(server):
    answer = completion(server, prompt="Hello", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_without_tokens_brings_the_logprobs_of_the_prompt(server):
    wish = {"prompt": TEXT, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = completion(server, **wish)
    choice = answer["choices"][0]
    probs = choice["logprobs"]
    assert choice["text"] == "".join(probs["tokens"]) == TEXT
    assert probs["token_logprobs"][0] is None
    assert probs["top_logprobs"][0] is None
    assert len(probs["tokens"]) == answer["usage"]["prompt_tokens"] > 1
    assert all(value <= 0 for value in probs["token_logprobs"][1:])
    chunks = completion_chunks(server, **wish)
    assert text_of(chunks) == TEXT
    assert chunks[0]["choices"][0]["logprobs"] == probs


def test_echo_goes_on_where_the_prompt_ends(server):
    plain = completion(server, logprobs=2)["choices"][0]
    echoed = completion(server, logprobs=2, echo=True)["choices"][0]
    assert echoed["text"] == TEXT + plain["text"]
    count = len(plain["logprobs"]["tokens"])
    assert echoed["logprobs"]["tokens"][-count:] == plain["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][-count:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert echoed["logprobs"]["text_offset"][-count] == len(TEXT)


def test_prompt_logprobs_have_ranks_and_a_null_first(server):
    answer = completion(server, prompt_logprobs=2, max_tokens=1, return_token_ids=True)
    choice = answer["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, place in zip(choice["prompt_token_ids"][1:], others, strict=True):
        chosen = place[str(token_id)]
        assert {1, 2} <= {entry["rank"] for entry in place.values()}
        assert chosen["logprob"] <= max(entry["logprob"] for entry in place.values())
        assert set(chosen) == {"logprob", "rank", "decoded_token"}


# --------------------------------------------------------------------------- chat


def test_parts_of_a_message_are_its_text(server):
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "yes."}]
    by_parts = chat(server, {"role": "user", "content": parts}, return_token_ids=True)
    whole = chat(server, "Say \nyes.", return_token_ids=True)  # a line each, as in vLLM
    assert by_parts["prompt_token_ids"] == whole["prompt_token_ids"]
    assert by_parts["choices"] == whole["choices"]


def test_a_part_that_is_no_text_is_named(server):
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    status, error = refused(server, CHAT, messages=[{"role": "user", "content": parts}])
    assert status == 400
    assert error["param"].startswith("messages[0].content[1]")


def test_a_chat_goes_on_inside_its_last_message(server):
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    ids = answered(server, "/tokenize", {"messages": turns, **going_on})["tokens"]
    prompt = answered(server, "/detokenize", {"tokens": ids})["prompt"]
    assert prompt.endswith("One, two,")
    chatted = chat(server, *turns, **going_on)["choices"][0]
    assert chatted["message"]["content"] == completion(server, prompt=ids)["choices"][0]["text"]


def test_system_messages_and_several_turns_reach_the_model(server):
    turns = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"},
    ]  # fmt: skip
    answer = chat(server, *turns, return_token_ids=True)
    prompt = answered(server, "/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    places = [prompt.index(turn["content"]) for turn in turns]
    assert places == sorted(places)
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_tokenize_and_detokenize_are_each_others_way_back(server):
    text = "Grüße, 世界 😀!"
    told = answered(
        server,
        "/tokenize",
        {"prompt": text, "add_special_tokens": False, "return_token_strs": True},
    )
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == LONGEST
    assert answered(server, "/detokenize", {"tokens": told["tokens"]})["prompt"] == text


# --------------------------------------------------------------------------- choosing tokens


def test_logprobs_are_those_of_the_tokens_that_came(server):
    answer = completion(server, logprobs=3, return_token_ids=True)
    choice, probs = answer["choices"][0], answer["choices"][0]["logprobs"]
    count = answer["usage"]["completion_tokens"]
    assert [len(values) for values in probs.values()] == [count] * 4
    assert len(choice["token_ids"]) == count
    assert "".join(probs["tokens"]).startswith(choice["text"])
    for token, chosen, top in zip(
        probs["tokens"], probs["token_logprobs"], probs["top_logprobs"], strict=True
    ):
        assert top[token] == chosen == max(top.values())  # greedy takes the likeliest
        assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-6


def test_chat_logprobs_hold_bytes_and_as_many_alternatives_as_asked(server):
    answer = chat(server, logprobs=True, top_logprobs=4)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for place in content:
        assert len(place["top_logprobs"]) == 4
        assert place["logprob"] == place["top_logprobs"][0]["logprob"]
        values = [entry["logprob"] for entry in place["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    spelled = b"".join(bytes(place["bytes"] or []) for place in content)
    assert spelled.startswith(answer["choices"][0]["message"]["content"].encode())


def test_a_bias_and_an_allowed_list_decide_what_comes(server):
    (wanted,) = ids_of(server, "x")
    forced = completion(server, logit_bias={str(wanted): 100}, return_token_ids=True)
    assert set(forced["choices"][0]["token_ids"]) == {wanted}
    allowed = completion(
        server,
        allowed_token_ids=[*ids_of(server, "a"), *ids_of(server, "b")],
        temperature=1,
        seed=4,
    )
    assert set(allowed["choices"][0]["text"]) <= {"a", "b"}


def test_what_is_banned_does_not_come(server):
    first = completion(server, return_token_ids=True)["choices"][0]["token_ids"]
    again = completion(server, banned_token_ids=[first[0]], return_token_ids=True)
    assert first[0] not in again["choices"][0]["token_ids"]
    word = completion(server)["choices"][0]["text"].split()[0]
    text = completion(server, bad_words=[word])["choices"][0]["text"]
    assert not text.strip().startswith(word)


def test_penalties_keep_a_text_from_repeating_itself(server):
    few = [token for letter in "abcdefgh" for token in ids_of(server, letter)]
    wish = {"logit_bias": {str(token): 40 for token in few}, "return_token_ids": True}
    wish |= {"allowed_token_ids": few}
    spread = completion(server, prompt="ZZ", **wish, max_tokens=8, repetition_penalty=100)[
        "choices"
    ][0]
    assert sorted(spread["token_ids"]) == sorted(few)  # each once: none is likely twice

    wish |= {"temperature": 1, "seed": 1, "max_tokens": 64}
    plain = completion(server, **wish)["choices"][0]
    varied = completion(server, **wish, frequency_penalty=2, presence_penalty=2)["choices"][0]
    most = [Counter(choice["token_ids"]).most_common(1)[0][1] for choice in (plain, varied)]
    assert most[1] < most[0]


def test_the_same_seed_draws_the_same_in_any_company(server):
    wish = {"temperature": 1, "seed": 7, "max_tokens": 24, "presence_penalty": 0.5, "logprobs": 1}
    alone = completion(server, **wish)["choices"]
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(completion, server, **wish) for _ in range(4)]
        crowd += [pool.submit(completion, server, prompt=f"{n}", **wish) for n in range(4)]
        answers = [one.result()["choices"] for one in crowd]
    assert answers[:4] == [alone] * 4


# --------------------------------------------------------------------------- ends


def test_a_stop_string_ends_text_and_usage(server):
    whole = completion(server, max_tokens=30, return_token_ids=True)["choices"][0]
    stop = whole["text"][6:9]
    end = whole["text"].index(stop)
    for shown, kept in ((False, ""), (True, stop)):
        wish = {"stop": [stop], "include_stop_str_in_output": shown, "max_tokens": 30}
        wish |= {"return_token_ids": True, "logprobs": 0}
        answer = completion(server, **wish)
        choice = answer["choices"][0]
        assert choice["text"] == whole["text"][:end] + kept
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        count = answer["usage"]["completion_tokens"]
        assert choice["token_ids"] == whole["token_ids"][:count]
        assert len(choice["logprobs"]["tokens"]) == count < 30
        assert text_of(completion_chunks(server, **wish)) == choice["text"]


def test_a_stop_token_ends_and_is_named(server):
    ids = completion(server, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    answer = completion(server, max_tokens=8, stop_token_ids=[ids[3]], return_token_ids=True)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    assert choice["token_ids"] == ids[: ids.index(ids[3]) + 1]


# --------------------------------------------------------------------------- frames


def test_deltas_joined_are_the_whole_text(server):
    wish = {"max_tokens": 60, "temperature": 0.9, "seed": 11}
    whole = chat(server, "Tell me a tale.", **wish)["choices"][0]
    chunks = chat_chunks(server, "Tell me a tale.", **wish)
    assert text_of(chunks) == whole["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_once_at_the_end_or_with_every_chunk(server):
    chat(server)  # from now on its prompt is cached
    whole = chat(server)["usage"]
    chunks = chat_chunks(server, stream_options={"include_usage": True})
    assert [c["usage"] for c in chunks] == [None] * (len(chunks) - 1) + [whole]
    assert [c["choices"] == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [c["usage"] for c in chat_chunks(server, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts)
    assert (counts[0], told[-1]) == (0, whole)
    assert {usage["prompt_tokens"] for usage in told} == {whole["prompt_tokens"]}


def test_tokens_and_logprobs_of_a_stream_are_those_of_the_whole(server):
    wish = {"logprobs": 2, "return_token_ids": True, "max_tokens": 30}
    whole = completion(server, **wish)["choices"][0]
    chunks = [c["choices"][0] for c in completion_chunks(server, **wish)]
    assert [t for c in chunks for t in c.get("token_ids") or []] == whole["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for name, values in whole["logprobs"].items():
        assert [v for c in chunks if c["logprobs"] for v in c["logprobs"][name]] == values


# --------------------------------------------------------------------------- what is not done


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"n": 129}, "n"), ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 2, "stream": True}, "best_of"), ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True, "stop": "x"}, "stop"), ({"length_penalty": 2}, "length_penalty"),
        ({"priority": 1}, "priority"), ({"deadline_s": 0}, "deadline_s"),
        ({"suffix": "x"}, "suffix"), ({"logprobs": 21}, "logprobs"), ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"presence_penalty": 3}, "presence_penalty"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"no_such_field": 1}, "no_such_field"), ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt[1]"), ({"prompt": [1, True]}, "prompt[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_honoured_is_refused_and_named(server, wish, param):
    status, error = refused(server, COMPLETIONS, **{"prompt": "x", **wish})
    assert (status, error["param"]) == (400, param), error
    assert error["message"].startswith(param) or param in error["message"]
