"""Fields that a client can get wrong, and what is not honoured: named, and nothing is submitted."""

from typing import Any

import pytest

from tests.gateway.house import House
from tests.gateway.refusals import refused

CHAT = [{"role": "user", "content": "Hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def short(value: Any) -> str:
    return repr(value)[:60]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "a string or a list, not an integer"),
    ({"prompt": True}, "prompt", "a string or a list, not a boolean"),
    ({"prompt": {"a": 1}}, "prompt", "a string or a list, not an object"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt[0]", "empty list"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty list"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": ["a", 5]}, "prompt[1]", "is an integer, but prompt[0] is a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", "is a string, but prompt[0] is an integer"),
    ({"prompt": [1, [2]]}, "prompt[1]", "is a list, but prompt[0] is an integer"),
    ({"prompt": [1, True]}, "prompt[1]", "is a boolean"),
    ({"prompt": [True]}, "prompt[0]", "not a boolean"),
    ({"prompt": [None]}, "prompt[0]", "not null"),
    ({"prompt": [1.0]}, "prompt[0]", "not a fraction"),
    ({"prompt": [[1, 2], [3, True]]}, "prompt[1][1]", "not a boolean"),
    ({"prompt": [["a"]]}, "prompt[0][0]", "not a string"),
    ({"prompt": [5, -1]}, "prompt[1]", "no token id"),
    ({"prompt": [5, 2**31]}, "prompt[1]", "no token id"),
    ({"prompt": [5, 512]}, "prompt[1]", "512 is not in the vocabulary (0..511)"),
    ({"prompt": [[1] * 17, [2] * 17 + [600]]}, "prompt[1][17]", "600 is not in the vocabulary"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts, not 1025"),
    ({"prompt": ["a", "x" * 8190]}, "max_tokens", "prompt[1] has 8190 tokens and 16 more"),
    ({"prompt": [[1], [2] * 9000]}, "prompt[1]", "prompt[1] has 9000 tokens"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 5.0}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": -1}, "max_tokens", "at least 0, not -1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**12}, "max_tokens", "at most 2147483647, not 1000000000000"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "above max_tokens 3"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": 1e300}, "temperature", "from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 129}, "n", "at most 128, not 129"),
    ({"n": 2.0}, "n", "integer"),
    ({"n": 2, "temperature": 0}, "n", "must be 1 at temperature 0, not 2"),
    ({"best_of": 0}, "best_of", "at least 1, not 0"),
    ({"best_of": 129}, "best_of", "at most 128, not 129"),
    ({"best_of": 2, "n": 3}, "best_of", "below n 3"),
    ({"best_of": 1, "n": 2}, "best_of", "below n 2"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", "above n 2"),
    ({"best_of": 2, "temperature": 0}, "best_of", "must be 1 at temperature 0, not 2"),
    ({"n": 2, "temperature": 0}, "n", "those of use_beam_search are not"),
    ({"use_beam_search": 1}, "use_beam_search", "boolean"),
    ({"use_beam_search": True, "n": 129}, "n", "at most 128, not 129"),
    ({"use_beam_search": True, "n": 0}, "n", "at least 1"),
    ({"use_beam_search": True, "temperature": 1}, "temperature", "must be 0"),
    ({"use_beam_search": True, "temperature": 1e-9}, "temperature", "must be 0"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p", "leave it out"),
    ({"use_beam_search": True, "top_k": 5}, "top_k", "leave it out"),
    ({"use_beam_search": True, "min_p": 0.1}, "min_p", "leave it out"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "leave it out"),
    ({"use_beam_search": True, "frequency_penalty": 1}, "frequency_penalty", "leave it out"),
    ({"use_beam_search": True, "repetition_penalty": 2}, "repetition_penalty", "leave it out"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
    ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids", "leave it out"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words", "leave it out"),
    ({"use_beam_search": True, "banned_token_ids": [5]}, "banned_token_ids", "leave it out"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "stop_token_ids"),
    ({"use_beam_search": True, "best_of": 2, "n": 2}, "best_of", "n is their number"),
    ({"use_beam_search": True, "max_tokens": 0, "echo": True}, "max_tokens", "at least 1"),
    ({"use_beam_search": True, "length_penalty": 10.1}, "length_penalty", "from -10 to 10"),
    ({"use_beam_search": True, "length_penalty": "1"}, "length_penalty", "number"),
    ({"use_beam_search": True, "early_stopping": 1}, "early_stopping", 'true, false or "never"'),
    ({"use_beam_search": True, "early_stopping": "no"}, "early_stopping", '"never"'),
    ({"length_penalty": 2}, "length_penalty", "is for beams"),
    ({"early_stopping": True}, "early_stopping", "is for beams"),
    ({"early_stopping": "never", "use_beam_search": False}, "early_stopping", "is for beams"),
    ({"priority": 2**31}, "priority", "at most 2147483647"),
    ({"priority": -(2**31) - 1}, "priority", "at least -2147483648"),
    ({"priority": 1.0}, "priority", "integer"),
    ({"priority": True}, "priority", "integer"),
    ({"deadline_s": 0}, "deadline_s", "must be above 0, not 0"),
    ({"deadline_s": -0.5}, "deadline_s", "above 0"),
    ({"deadline_s": 86_400.5}, "deadline_s", "at most 86400, not 86400.5"),
    ({"deadline_s": 90_000.0}, "deadline_s", "at most 86400, not 90000"),
    ({"length_penalty": 11, "use_beam_search": True}, "length_penalty", "from -10 to 10, not 11"),
    ({"deadline_s": "5"}, "deadline_s", "number"),
    ({"deadline_s": 10**4000}, "deadline_s", "too large"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt", "1152 answers; at most 1024 in one request"),
    ({"prompt": ["a"] * 513, "best_of": 2}, "prompt", "answered 2 times each: 1026 answers"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 characters"),
    ({"cache_salt": "x" * 129}, "cache_salt", "at most 128"),
    ({"cache_salt": 5}, "cache_salt", "string"),
    ({"n": 10**4000}, "n", "at most 2147483647, not 1000"),
    ({"temperature": 10**4000}, "temperature", "too large"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids[0]", "at most"),
    ({"s" * 5000: 1}, "s" * 64 + "...", "not a field"),
    ({"stop": ""}, "stop[0]", "empty"),
    ({"stop": ["a", ""]}, "stop[1]", "empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 1025}, "stop[0]", "at most 1024"),
    ({"stop": 7}, "stop", "list"),
    ({"stop": [7]}, "stop[0]", "string"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "vocabulary (0..511)"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "takes at most 256 ids, not 257"),
    ({"stop_token_ids": "1"}, "stop_token_ids", "list"),
    ({"stream": 1}, "stream", "boolean"),
    ({"stream": "true"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream to true"),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "boolean",
    ),
    ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise", "not a field"),
    ({"stream": True, "stream_options": {"name": None}}, "stream_options.name", "not a field"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "boolean"),
    ({"prompt_cache_key": 1}, "prompt_cache_key", "string"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "needs include_usage",
    ),
    ({"echo": 1}, "echo", "boolean"),
    ({"logprobs": 21}, "logprobs", "at most 20, not 21"),
    ({"logprobs": -1}, "logprobs", "at least 0, not -1"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs", "with logprobs 2"),
    ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "number"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {"4": 1, "5": 101}}, "logit_bias", "of token 5 must be a number from -100 to"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "vocabulary (0..511)"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no token id in decimal"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "'05' is no token id in decimal"),
    ({"logit_bias": {"x" * 500: 1}}, "logit_bias", "xxx...' is no token id"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "number"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024"),
    ({"allowed_token_ids": [512]}, "allowed_token_ids", "vocabulary"),
    ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1]", "integer"),
    ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "at most 1024"),
    ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "allowed_token_ids", "leaves no token"),
    ({"banned_token_ids": [5, 512]}, "banned_token_ids[1]", "vocabulary"),
    ({"banned_token_ids": [5, 5, 512]}, "banned_token_ids[2]", "vocabulary"),
    ({"banned_token_ids": [-1]}, "banned_token_ids[0]", "at least 0"),
    ({"banned_token_ids": [1] * 129}, "banned_token_ids", "at most 128"),
    ({"bad_words": "x"}, "bad_words", "list"),
    ({"bad_words": ["x", ""]}, "bad_words[1]", "empty"),
    ({"bad_words": ["x", "  "]}, "bad_words[1]", "no tokens"),
    ({"bad_words": ["x", "x", "  "]}, "bad_words[2]", "no tokens"),
    ({"bad_words": ["x" * 33]}, "bad_words[0]", "has 33 tokens; at most 32"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]", "at most 128"),
    ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
    ({"return_token_ids": 1}, "return_token_ids", "boolean"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", "boolean"),
    ({"strange": None}, "strange", "not a field"),
    ({"temprature": 1}, "temprature", "not a field of this endpoint; did you mean temperature?"),
    ({"max_token": 1}, "max_token", "did you mean max_tokens?"),
    *[
        ({name: 4}, name, "not a field of this endpoint; say use_beam_search and n")
        for name in ("num_beams", "beam_width", "num_return_sequences")
    ],
    ({"x" * 65: 1}, "x" * 64 + "...", "leave it out"),
    ({"user": 5}, "user", "string"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "takes at most 16 pairs, not 17"),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_COMPLETIONS, ids=short)
async def test_a_bad_completion_field_is_named(house, fields, param, said) -> None:
    fields = fields if "prompt" in fields or not fields else {"prompt": "Hi", **fields}
    status, told, _, message = await refused(house, COMPLETIONS, fields)
    assert (status, told) == (400, param)
    assert said in message
    assert len(message) < 250


TEXT = {"type": "text", "text": "Hi"}


def parts(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": ["Hi"]}, "messages[0]", "must be an object, not a string"),
    ({"messages": [{"role": "x" * 5000, "content": "Hi"}]}, "messages[0].role", "xxx'..."),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is null; give"),
    ({"messages": [*CHAT, {"role": "user", "content": 5}]}, "messages[1].content", "string"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role", "'user'"),
    (
        {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6},
        "max_completion_tokens",
        "max_tokens is 5",
    ),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"messages": CHAT, "max_completion_tokens": -5}, "max_completion_tokens", "not -5"),
    ({"messages": [{**CHAT[0], "mood": "x"}]}, "messages[0].mood", "not a field"),
    ({"messages": [{**CHAT[0], "type": "x"}]}, "messages[0].type", "not supported"),
    (
        {"messages": [{**CHAT[0], "include_obfuscation": None}]},
        "messages[0].include_obfuscation",
        "not a field",
    ),
    ({"messages": [parts()]}, "messages[0].content", "is empty"),
    ({"messages": [parts("x")]}, "messages[0].content[0]", "must be an object"),
    ({"messages": [parts(TEXT, {})]}, "messages[0].content[1].type", "required"),
    ({"messages": [parts({"type": "text"})]}, "messages[0].content[0].text", "required"),
    ({"messages": [parts(TEXT | {"text": 5})]}, "messages[0].content[0].text", "string"),
    ({"messages": [parts(TEXT | {"mood": 5})]}, "messages[0].content[0].mood", "not a field"),
    ({"messages": CHAT, "n": 129}, "n", "at most 128, not 129"),
    ({"messages": CHAT, "n": 2, "temperature": 0}, "n", "must be 1 at temperature 0"),
    ({"messages": CHAT, "best_of": 2, "stream": True}, "best_of", "above n 1"),
    ({"messages": CHAT, "use_beam_search": True, "temperature": 1}, "temperature", "must be 0"),
    ({"messages": CHAT, "use_beam_search": True, "stop": "x"}, "stop", "stop_token_ids"),
    ({"messages": CHAT, "length_penalty": 0.5}, "length_penalty", "is for beams"),
    ({"messages": CHAT, "deadline_s": 0}, "deadline_s", "above 0"),
    ({"messages": CHAT, "priority": "high"}, "priority", "integer"),
    ({"messages": CHAT, "cache_salt": ""}, "cache_salt", "at least 1 characters"),
    ({"messages": CHAT, "top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
    ({"messages": CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
    ({"messages": CHAT, "logprobs": 1}, "logprobs", "boolean"),
    (
        {"messages": CHAT, "continue_final_message": True},
        "continue_final_message",
        "needs add_generation_prompt: false",
    ),
    (
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
        "of the assistant, not of the user",
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CHATS, ids=short)
async def test_a_bad_chat_field_is_named(house, fields, param, said) -> None:
    status, told, _, message = await refused(house, CHATS, fields)
    assert (status, told) == (400, param)
    assert said in message


NOT_YET = [
    (COMPLETIONS, "suffix", {"suffix": "x"}),
    (COMPLETIONS, "store", {"store": True}),
    (COMPLETIONS, "service_tier", {"service_tier": "flex"}),
    (COMPLETIONS, "max_completion_tokens", {"max_completion_tokens": 3}),
    (CHATS, "tools", {"tools": [{"type": "function"}]}),
    (CHATS, "tool_choice", {"tool_choice": "auto"}),
    (CHATS, "response_format", {"response_format": {"type": "json_object"}}),
    (CHATS, "chat_template", {"chat_template": "x"}),
    (CHATS, "messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    (CHATS, "messages[0].role", {"messages": [{"role": "tool", "tool_call_id": "x"}]}),
    (CHATS, "messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": [1]}]}),
    (
        COMPLETIONS,
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ),
    (CHATS, "verbosity", {"verbosity": "low"}),
    (CHATS, "messages[0].name", {"messages": [{**CHAT[0], "name": "x"}]}),
    (CHATS, "messages[0].content[1].type", {"messages": [parts(TEXT, {"type": "image_url"})]}),
    (CHATS, "echo", {"echo": True}),
    (COMPLETIONS, "top_logprobs", {"top_logprobs": 1}),
    (COMPLETIONS, "add_generation_prompt", {"add_generation_prompt": True}),
]


@pytest.mark.parametrize(("path", "param", "fields"), NOT_YET, ids=repr)
async def test_what_is_not_honoured_is_refused_never_ignored(house, path, param, fields) -> None:
    base: dict[str, Any] = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": CHAT}
    status, told, code, message = await refused(house, path, base | fields)
    assert (status, told, code) == (400, param, "unsupported_parameter")
    assert "not supported" in message or "belongs to" in message


NEUTRAL = [
    {"n": 1, "best_of": 1, "logprobs": None, "suffix": None, "user": "x", "service_tier": "auto"},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None},
    {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "suffix": ""},
    {"messages": None, "max_completion_tokens": None, "functions": None, "audio": None},
    {"store": False, "metadata": {}, "seed": None, "stream_options": None},
    {"service_tier": "default", "parallel_tool_calls": True, "spaces_between_special_tokens": True},
    {"use_beam_search": False, "length_penalty": 1, "early_stopping": False, "priority": 0},
    {"use_beam_search": None, "length_penalty": 1.0, "early_stopping": None, "deadline_s": None},
    {"use_beam_search": True, "temperature": 0, "top_p": 1, "top_k": -1, "stop": [], "n": 1},
    {"parallel_tool_calls": False, "prompt_cache_key": "x", "safety_identifier": "y"},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=repr)
async def test_what_asks_for_nothing_is_taken(house: House, fields: dict[str, Any]) -> None:
    assert (await house.complete(**fields))["choices"][0]["text"] == "ok"


NEUTRAL_MESSAGES = [
    {"role": "user", "content": "Hi", "type": "text"},
    {"role": "assistant", "content": "Hi", "tool_calls": [], "annotations": [], "audio": None},
]


async def test_a_message_may_carry_what_asks_for_nothing(house: House) -> None:
    status, answer = await house.post(CHATS, messages=[*NEUTRAL_MESSAGES, *CHAT])
    assert status == 200, answer


async def test_stream_options_may_carry_what_asks_for_nothing(house: House) -> None:
    options = {"include_obfuscation": False}
    async with house.stream(COMPLETIONS, prompt="Hi", stream_options=options) as events:
        assert (await events.rest())[-1] == "[DONE]"


async def test_banned_ids_are_never_called_bad_words(house: House) -> None:
    fields = {"prompt": "x", "allowed_token_ids": [5], "banned_token_ids": [5]}
    _, param, _, message = await refused(house, COMPLETIONS, fields)
    assert param == "allowed_token_ids"
    assert "banned_token_ids" in message
    assert "bad_words" not in message
    _, param, _, message = await refused(house, COMPLETIONS, {**fields, "bad_words": ["x"]})
    assert param == "allowed_token_ids"
    assert "bad_words" in message
