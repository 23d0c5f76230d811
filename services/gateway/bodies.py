"""The bodies a client may send, as models: their fields, and what each means.

These models check types and say in /openapi.json what is taken. Every field may be null, which
means absent.
"""

from typing import Annotated, Literal

from pydantic import FailFast, Field

from services.gateway.answer_size import MAX_LOGPROBS_IN_ALL
from services.gateway.field_types import (
    INT32_MAX,
    MAX_BAD_TEXT_CHARACTERS,
    MAX_BAD_TEXTS,
    MAX_BANNED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_DEADLINE_S,
    MAX_MESSAGES,
    MAX_METADATA,
    MODEL,
    RETURN_TOKEN_STRS,
    TEXT,
    Content,
    EarlyStopping,
    Flag,
    Prompt,
    StopStrings,
    Strict,
    TokenId,
    TokenIds,
    between,
    count,
    ids_field,
)
from shared.sampling import (
    INT64,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BIASES,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)


class StreamOptionsBody(Strict):
    """How a stream looks; only with `stream`: true."""

    include_usage: Flag = Field(None, description="a last chunk with the usage")
    continuous_usage_stats: Flag = Field(
        None, description="the usage so far in every chunk; only with include_usage"
    )
    resumable: Flag = Field(
        None,
        description=(
            "keep the stream for a while when this client leaves: it can go on where it was, at "
            "GET /v1/streams/{id}; default: a client that leaves does not come back"
        ),
    )


class MessageBody(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class GenerationBody(Strict):
    """What both endpoints that generate take."""

    model: str | None = MODEL
    max_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="tokens to generate at most"
    )
    min_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="no end before so many; at most max_tokens"
    )
    temperature: float | None = between(0, 100, "default 1; 0 takes the likeliest token")
    top_p: float | None = between(
        0, 1, "draw from the likeliest that have so much together; default 1: all", open_low=True
    )
    top_k: int | None = Field(
        None, ge=-1, le=INT32_MAX, description="draw from so many; 0 (default), -1: all"
    )
    min_p: float | None = between(
        0, 1, "draw from those with this share of the likeliest's; default 0: all"
    )
    n: int | None = count(
        "answers to each prompt; default 1; above 1 not at temperature 0 but with use_beam_search"
    )
    best_of: int | None = count(
        "generate so many answers to each prompt and tell the n with the highest mean "
        "log-probability of a token, best first; default n; not below it, and not above it in a "
        "stream; above 1 not at temperature 0; not with use_beam_search"
    )
    use_beam_search: Flag = Field(
        None,
        description=(
            "search the n likeliest texts with n beams, as transformers does, and tell them best "
            "first, each when all are found. Nothing is drawn: temperature is 0 or left out, as "
            "is all else that changes draws, and stop; max_tokens is not 0"
        ),
    )
    length_penalty: float | None = between(
        -MAX_LENGTH_PENALTY,
        MAX_LENGTH_PENALTY,
        "only with use_beam_search: a text's score is the sum of its log-probabilities over its "
        "length to this power; default 1",
    )
    early_stopping: EarlyStopping = None
    seed: int | None = between(
        INT64.start, INT64.stop - 1, "the same seed, the same answer; default: drawn"
    )
    stop: StopStrings = None
    stop_token_ids: list[TokenId] | None = ids_field(
        MAX_STOP_TOKEN_IDS, "tokens that end the answer"
    )
    ignore_eos: Flag = Field(None, description="go on after the model's end of text")
    include_stop_str_in_output: Flag = Field(
        None, description="the answer ends with what ended it of stop or stop_token_ids, as text"
    )
    presence_penalty: float | None = between(-2, 2, "off a token that the answer has; default 0")
    frequency_penalty: float | None = between(-2, 2, "off for each time it has it; default 0")
    repetition_penalty: float | None = between(
        0, 100, "divides what prompt or answer have; default 1", open_low=True
    )
    logit_bias: dict[str, float] | None = Field(
        None,
        description="added to the logit of a token, by its id in decimal",
        json_schema_extra={
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    )
    allowed_token_ids: list[TokenId] | None = ids_field(
        MAX_ALLOWED_TOKEN_IDS, "no other is drawn; empty: all"
    )
    bad_words: list[str] | None = Field(
        None,
        description=(
            "texts that the answer does not come to hold: a text's tokens, and those of the text "
            "after a space where they are as many, never follow one another"
        ),
        json_schema_extra={
            "maxItems": MAX_BAD_TEXTS,
            "items": TEXT | {"maxLength": MAX_BAD_TEXT_CHARACTERS},
        },
    )
    banned_token_ids: list[TokenId] | None = ids_field(MAX_BANNED_TOKEN_IDS, "never drawn")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=(
            "log-probabilities of the prompt's tokens and so many others; not streamed. Of one "
            f"answer, those of prompts and choices are at most {MAX_LOGPROBS_IN_ALL} together"
        ),
    )
    return_token_ids: Flag = Field(None, description="token_ids and prompt_token_ids beside text")
    return_tokens_as_token_ids: Flag = Field(
        None, description="log-probabilities write a token as token_id:123, never two alike"
    )
    add_special_tokens: Flag = Field(
        None,
        description="what the model wants around a text (BOS): default true, in chats false",
    )
    stream: Flag = Field(None, description="answer by server-sent events, token by token")
    stream_options: StreamOptionsBody | None = Field(
        None, description="how it looks; only with stream: true"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT_CHARACTERS,
        description=(
            "computed blocks are shared only with requests of the same salt and the same API key: "
            "nobody else can learn by the time to a first token what was asked before"
        ),
    )
    priority: int | None = Field(
        None,
        ge=-INT32_MAX - 1,
        le=INT32_MAX,
        description=(
            "the lowest is served first, before whoever came earlier; default 0; another one only "
            "where the server has --scheduling-policy priority"
        ),
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_S,
        description=(
            "seconds from the request's arrival after which nobody wants the answer: what is not "
            "whole by then ends with 408 deadline_exceeded, or with that error as an event"
        ),
    )
    user: str | None = Field(None, description="taken without effect")
    safety_identifier: str | None = Field(None, description="taken without effect")
    prompt_cache_key: str | None = Field(None, description="taken without effect")
    metadata: dict[str, str] | None = Field(
        None,
        description="taken without effect",
        json_schema_extra={"maxProperties": MAX_METADATA},
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="default 16; 0 only with echo or prompt_logprobs"
    )
    echo: Flag = Field(None, description="the prompt before the answer")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of each token and so many likeliest ones"
    )


class ConversationBody(Strict):
    """What is made a prompt by the model's chat template."""

    messages: Annotated[
        list[MessageBody],
        Field(
            min_length=1,
            description="the conversation, oldest first",
            json_schema_extra={"maxItems": MAX_MESSAGES},
        ),
        FailFast(),
    ]
    add_generation_prompt: Flag = Field(
        None, description="default true: the prompt ends where the assistant's answer begins"
    )
    continue_final_message: Flag = Field(
        None,
        description=(
            "the answer goes on with the last message, which is the assistant's; only with "
            "add_generation_prompt: false"
        ),
    )


class ChatBody(ConversationBody, GenerationBody):
    """POST /v1/chat/completions."""

    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32_MAX,
        description=(
            "default: what fits in the context and, with logprobs, in "
            f"{MAX_LOGPROBS_IN_ALL} log-probabilities; not 0"
        ),
        json_schema_extra={"minimum": 1},
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32_MAX,
        description="the same as max_tokens; if both are given, they must be equal",
        json_schema_extra={"minimum": 1},
    )
    logprobs: Flag = Field(None, description="log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="and of so many likeliest ones; above 0 only with logprobs: true",
    )


class TokenizeTextBody(Strict):
    """POST /tokenize: a text."""

    model: str | None = MODEL
    prompt: str
    add_special_tokens: Flag = Field(None, description="BOS and the like; default true")
    return_token_strs: Flag = RETURN_TOKEN_STRS


class TokenizeChatBody(ConversationBody):
    """POST /tokenize: a conversation."""

    model: str | None = MODEL
    add_special_tokens: Flag = Field(None, description="BOS and the like; default false")
    return_token_strs: Flag = RETURN_TOKEN_STRS


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = MODEL
    tokens: TokenIds
