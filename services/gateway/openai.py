"""What a client may ask, in OpenAI's words (and vLLM's): bodies in, a `Call` out.

Strict: "1" is not 1, true is not 1, a field that is not known is refused, and so is one that is
known but not honoured yet. null means absent. Values that ask for nothing (`n: 1`, `best_of: 1`,
`frequency_penalty: 0`) are honoured by doing nothing.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from services.gateway.call import Call, Chat, Endpoint, StreamOptions
from services.gateway.field_errors import explained, written
from services.gateway.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from shared.errors import InvalidField, Unsupported
from shared.sampling import MAX_STOP_TOKEN_IDS, DrawParams, SamplingParams

INT32_MAX: Final = 2**31 - 1
MAX_MESSAGES: Final = 4096
MAX_METADATA: Final = 16  # OpenAI's
COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's and vLLM's default for /v1/completions

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto",),
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "priority": (0,),
    "cache_salt": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of which only these values are taken, because they ask for what happens anyway."""

REFUSED: Final = frozenset(
    ("add_special_tokens", "allowed_token_ids", "audio", "bad_words", "chat_template",
     "chat_template_kwargs", "documents", "echo", "function_call", "functions", "guided_choice",
     "guided_grammar", "guided_json", "guided_regex", "kv_transfer_params", "logits_processors",
     "max_completion_tokens", "messages", "mm_processor_kwargs", "parallel_tool_calls",
     "prediction", "prompt", "prompt_cache_key", "prompt_embeds", "prompt_logprobs",
     "reasoning_effort", "request_id", "safety_identifier", "spaces_between_special_tokens",
     "structured_outputs", "truncate_prompt_tokens", "verbosity", "web_search_options")
)  # fmt: skip
"""Fields of OpenAI or vLLM that this endpoint does not have (yet), whatever their value."""

_ELSEWHERE: Final = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str


_Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
_Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]


class _Body(_Strict):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: _Count | None = None
    min_tokens: _Count = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: float = 0.0
    n: _Int32 = 1
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[_Int32] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class _Completion(_Body):
    prompt: str
    echo: bool = False


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1), FailFast()]
    max_completion_tokens: _Count | None = None


_MOST: Final = (
    ("stop", MAX_STOP_STRINGS, "strings"),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids"),
    ("messages", MAX_MESSAGES, "messages"),
    ("metadata", MAX_METADATA, "pairs"),
)
"""Checked before anything looks at the items."""


def parse_completion(fields: dict[str, Any]) -> Call:
    """A body of POST /v1/completions. Raises: InvalidField or Unsupported, naming the field."""
    if isinstance(fields.get("prompt"), list):
        raise Unsupported("prompt", "as a list (of prompts or token ids) is not supported yet")
    body = _validate(_Completion, fields)
    if not body.prompt:
        raise InvalidField("prompt", "is empty; give at least one character")
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidField("max_tokens", "must be at least 1 (0 only with echo)")
    return _call("completion", body, max_tokens, prompts=(body.prompt,), echo=body.echo)


def parse_chat(fields: dict[str, Any]) -> Call:
    """A body of POST /v1/chat/completions. Raises: InvalidField or Unsupported."""
    _check_sizes(fields)
    _refuse_parts(fields.get("messages"))
    body = _validate(_Chat, fields)
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidField(
            "max_completion_tokens",
            f"is {body.max_completion_tokens}, but max_tokens is {body.max_tokens}; give one",
        )
    max_tokens, name = body.max_tokens, "max_tokens"
    if max_tokens is None and body.max_completion_tokens is not None:
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens == 0:
        raise InvalidField(name, "must be at least 1")
    messages = tuple([message.model_dump() for message in body.messages])
    return _call("chat", body, max_tokens, name, chat=Chat(messages))


def _call(
    endpoint: Endpoint,
    body: _Body,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    *,
    prompts: tuple[str, ...] = (),
    chat: Chat | None = None,
    echo: bool = False,
) -> Call:
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options", "is for streams: set stream to true or leave it out")
    sampling = SamplingParams(
        draw=DrawParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,
            min_p=body.min_p,
        ),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
    options = body.stream_options or _StreamOptions()
    return Call(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        chat=chat,
        sampling=sampling,
        stop=_stop_strings(body.stop),
        stream=StreamOptions(options.include_usage) if body.stream else None,
        echo=echo,
        max_tokens_name=max_tokens_name,
    )


def _stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    for index, string in enumerate(strings):
        if not string:
            raise InvalidField(f"stop[{index}]", "is empty; every text would stop at once")
        if len(string) > MAX_STOP_CHARACTERS:
            raise InvalidField(
                f"stop[{index}]",
                f"has {len(string)} characters; at most {MAX_STOP_CHARACTERS}",
            )
    return tuple(dict.fromkeys(strings))


def _check_sizes(fields: dict[str, Any]) -> None:
    for name, most, items in _MOST:
        value = fields.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise InvalidField(name, f"takes at most {most} {items}, not {len(value)}")


def _refuse_parts(messages: Any) -> None:
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict) and isinstance(message.get("content"), list):
                raise Unsupported(
                    f"messages[{index}].content",
                    "as a list of parts is not supported yet (give one string)",
                )


_BodyT = TypeVar("_BodyT", bound=_Body)


def _validate(model: type[_BodyT], fields: dict[str, Any]) -> _BodyT:
    _check_sizes(fields)
    try:
        return model.model_validate(_cleaned(model, fields))
    except ValidationError as error:
        raise explained(error) from None


def _cleaned(model: type[_Body], fields: dict[str, Any]) -> dict[str, Any]:
    """Without nulls and neutral values; a lone stop string as a list.

    The first unknown name ends it: pydantic would make an error of each.
    """
    kept = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in model.model_fields:
            if any(_same(value, neutral) for neutral in NEUTRAL.get(name, ())):
                continue
            if name in _ELSEWHERE:
                raise Unsupported(name, f"belongs to {_ELSEWHERE[name]}; leave it out here")
            if name in NEUTRAL or name in REFUSED:
                raise Unsupported(name)
            raise _unknown(name)
        kept[name] = value
    if isinstance(kept.get("stop"), str):
        kept["stop"] = [kept["stop"]]
    if isinstance(options := kept.get("stream_options"), dict):
        if _same(options.get("continuous_usage_stats"), False):
            options = {k: v for k, v in options.items() if k != "continuous_usage_stats"}
        kept["stream_options"] = _cleaned_inside(_StreamOptions, options, "stream_options")
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [
            _cleaned_inside(_Message, message, "messages", index)
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    return kept


def _cleaned_inside(
    model: type[_Strict], fields: dict[str, Any], *where: str | int
) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if value is not None}
    for name in kept:
        if name in _REFUSED_INSIDE:
            raise Unsupported(written(*where, name))
        if name not in model.model_fields:
            raise _unknown(*where, name)
    return kept


def _unknown(*path: str | int) -> InvalidField:
    return InvalidField(written(*path), "is not a field of this endpoint; leave it out")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


_REFUSED_INSIDE: Final = frozenset(
    ("name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call",
     "reasoning_content", "continuous_usage_stats", "include_obfuscation")
)  # fmt: skip
"""Fields of messages and stream options that OpenAI or vLLM have and this server has not."""
