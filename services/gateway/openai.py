"""What a client may ask, in OpenAI's words (and vLLM's): bodies in, a `Call` out.

Strict: "1" is not 1, true is not 1, a field that is not known is refused, and so is one that is
known but not honoured yet. null means absent. The fields are those of `bodies.py`.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from services.gateway.bodies import ChatBody, CompletionBody, GenerationBody, StreamOptionsBody
from services.gateway.body_fields import (
    IN_STREAM_OPTIONS,
    check_sizes,
    cleaned,
    cleaned_inside,
)
from services.gateway.call import Best, Call, StreamOptions
from services.gateway.conversation import chat_of, cleaned_messages
from services.gateway.field_errors import explained
from services.gateway.field_types import MAX_BAD_TEXT_CHARACTERS, MAX_CHOICES, Strict
from services.gateway.prompts import prompts_of
from services.gateway.stop_strings import MAX_STOP_CHARACTERS
from shared.errors import InvalidField
from shared.sampling import MAX_N, DrawParams, EarlyStopping, SamplingParams

COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's and vLLM's default for /v1/completions
_DECIMAL: Final = re.compile("0|[1-9][0-9]{0,9}")

_Body = TypeVar("_Body", bound=Strict)


def parse_completion(fields: dict[str, Any]) -> Call:
    """A body of POST /v1/completions. Raises: InvalidField or Unsupported, naming the field."""
    body = validate(CompletionBody, fields)
    prompts = prompts_of(body.prompt)
    echo = bool(body.echo)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    of_prompt = body.prompt_logprobs
    if max_tokens == 0 and not echo and of_prompt is None:
        raise InvalidField("max_tokens", "must be at least 1 (0 only with echo or prompt_logprobs)")
    if echo and body.logprobs is not None:
        if of_prompt not in (None, body.logprobs):
            raise InvalidField(
                "prompt_logprobs",
                f"is {of_prompt}, but echo brings the prompt's with logprobs {body.logprobs}: give "
                "the same or leave it out",
            )
        of_prompt = body.logprobs
    sampling = _sampling(body, max_tokens, body.logprobs, of_prompt)
    if (count := len(prompts) * sampling.n) > MAX_CHOICES:
        raise InvalidField(
            "prompt",
            f"has {len(prompts)} prompts, to be answered {sampling.n} times each: {count} answers; "
            f"at most {MAX_CHOICES} in one request",
        )
    return Call(
        endpoint="completion",
        prompts=prompts,
        echo=echo,
        sampling=sampling,
        best=_best(body, body.logprobs),
        add_special_tokens=body.add_special_tokens is not False,
        **_common(body),
    )


def parse_chat(fields: dict[str, Any]) -> Call:
    """A body of POST /v1/chat/completions. Raises: InvalidField or Unsupported."""
    body = validate(ChatBody, fields)
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
    if body.top_logprobs and not body.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Call(
        endpoint="chat",
        chat=chat_of(body),
        sampling=_sampling(body, max_tokens, logprobs, body.prompt_logprobs),
        best=_best(body, logprobs),
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens_name=name,
        **_common(body),
    )


def validate(model: type[_Body], fields: dict[str, Any]) -> _Body:
    """`fields` as the body they are. Raises: InvalidField or Unsupported, naming the field."""
    check_sizes(fields)
    kept = cleaned(fields, model.model_fields, generates=issubclass(model, GenerationBody))
    if isinstance(kept.get("stop"), str):
        kept["stop"] = [kept["stop"]]
    if isinstance(options := kept.get("stream_options"), dict):
        kept["stream_options"] = cleaned_inside(
            options, StreamOptionsBody.model_fields, IN_STREAM_OPTIONS, "stream_options"
        )
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = cleaned_messages(messages)
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise explained(error) from None


def _common(body: GenerationBody) -> dict[str, Any]:
    """The fields of a `Call` that both endpoints fill alike."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidField("prompt_logprobs", "is not streamed: leave it or stream out")
    return {
        "model": body.model,
        "bad_words": _texts("bad_words", body.bad_words or (), MAX_BAD_TEXT_CHARACTERS),
        "stop": tuple(dict.fromkeys(_texts("stop", body.stop or (), MAX_STOP_CHARACTERS))),
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "returns_prompt_logprobs": body.prompt_logprobs is not None,
        "is_seeded": body.seed is not None,
        "cache_salt": body.cache_salt or "",
        "priority": body.priority or 0,
        "deadline_s": body.deadline_s,
        "stream": _stream(body),
    }


def _best(body: GenerationBody, logprobs: int | None) -> Best | None:
    n = _or(body.n, 1)
    if body.best_of is None or body.best_of == n:
        return None
    return Best(n, hides_logprobs=logprobs is None)


def _num_answers(body: GenerationBody) -> int:
    """How many are generated to each prompt. Raises: InvalidField."""
    n = _or(body.n, 1)
    count, name = (n, "n") if body.best_of is None else (body.best_of, "best_of")
    for wish, value in (("n", n), (name, count)):
        if not 1 <= value <= MAX_N:
            limit = "at least 1" if value < 1 else f"at most {MAX_N}"
            raise InvalidField(wish, f"must be {limit}, not {value}")
    if count < n:
        raise InvalidField("best_of", f"is {count}, below n {n}: give at least n or leave it out")
    if body.stream and count > n:
        raise InvalidField(
            "best_of",
            f"is {count}, above n {n}: the best are known only at the end, so set stream to false "
            "or leave best_of out",
        )
    if body.temperature == 0 and count > 1 and not body.use_beam_search:
        raise InvalidField(
            "n" if n > 1 else name,
            f"must be 1 at temperature 0, not {n if n > 1 else count}: all answers would be alike "
            "(those of use_beam_search are not)",
        )
    return count


def _check_beams(body: GenerationBody, max_tokens: int | None) -> None:
    """Refuse what beams do not take, but for draws (`check_sampling`). Raises: InvalidField."""
    if not body.use_beam_search:
        return
    if body.best_of is not None:
        raise InvalidField("best_of", "is not for beams: n is their number; leave it out")
    if body.stop:
        raise InvalidField("stop", "is not for beams: give stop_token_ids, or leave it out")
    if max_tokens == 0:
        raise InvalidField("max_tokens", "must be at least 1 with use_beam_search")


def _early_stopping(given: Any) -> EarlyStopping:
    if given is None or isinstance(given, bool):
        return EarlyStopping.YES if given else EarlyStopping.NO
    if given == "never":
        return EarlyStopping.NEVER
    raise InvalidField("early_stopping", 'must be true, false or "never"')


def _stream(body: GenerationBody) -> StreamOptions | None:
    options = body.stream_options
    if options is None:
        return StreamOptions() if body.stream else None
    if not body.stream:
        raise InvalidField("stream_options", "is for streams: set stream to true or leave it out")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidField("stream_options.continuous_usage_stats", "needs include_usage: true")
    return StreamOptions(
        bool(options.include_usage),
        bool(options.continuous_usage_stats),
        bool(options.resumable),
    )


def _sampling(
    body: GenerationBody, max_tokens: int | None, logprobs: int | None, of_prompt: int | None
) -> SamplingParams:
    """All but `bad_words` that are texts; those best of several need log-probabilities."""
    _check_beams(body, max_tokens)
    num_answers = _num_answers(body)
    if logprobs is None and num_answers > _or(body.n, 1):
        logprobs = 0
    draw = DrawParams(
        temperature=_or(body.temperature, 0.0 if body.use_beam_search else 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_biases(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple([(token_id,) for token_id in body.banned_token_ids or ()]),
    )
    return SamplingParams(
        draw=draw,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        n=num_answers,
        use_beam_search=bool(body.use_beam_search),
        length_penalty=_or(body.length_penalty, 1.0),
        early_stopping=_early_stopping(body.early_stopping),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
    )


_Number = TypeVar("_Number", int, float)


def _or(given: _Number | None, default: _Number) -> _Number:
    return default if given is None else given


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for name in biases:
        if not _DECIMAL.fullmatch(name):
            shown = name if len(name) <= 20 else name[:20] + "..."
            raise InvalidField("logit_bias", f"{shown!r} is no token id in decimal")
    return tuple([(int(name), bias) for name, bias in biases.items()])


def _texts(name: str, texts: Sequence[str], most_characters: int) -> tuple[str, ...]:
    for index, text in enumerate(texts):
        if not text:
            raise InvalidField(f"{name}[{index}]", "is empty; every text would match at once")
        if len(text) > most_characters:
            raise InvalidField(
                f"{name}[{index}]", f"has {len(text)} characters; at most {most_characters}"
            )
    return tuple(texts)
