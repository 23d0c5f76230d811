"""How a request wants its tokens chosen, when it ends, and which of that we honour."""

import math
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import InvalidField, Unsupported
from shared.ids import Ids


class FinishReason(StrEnum):
    """Why a sequence ended; the first two are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EarlyStopping(StrEnum):
    """When a beam search ends; the three ways of transformers' `early_stopping`."""

    NO = "no"
    YES = "yes"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one token is chosen from the logits. Defaults change nothing.

    `temperature` 0 is greedy; `top_k` 0 keeps all. The order is penalties and bias, temperature,
    then top-k, top-p and min-p, each over what the one before kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Ids = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes. `max_tokens` None means "as many as fit"."""

    draw: DrawParams = DrawParams()
    seed: int = 0
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Ids = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


MAX_STOP_TOKEN_IDS = 256
INT64 = range(-(2**63), 2**63)

_DEFAULT = SamplingParams()
_NOT_YET = ("best_of", "use_beam_search", "length_penalty", "early_stopping", "logprobs",
            "prompt_logprobs")  # fmt: skip
_NOT_YET_DRAW = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
                 "allowed_token_ids")  # fmt: skip


def check_draw_supported(draw: DrawParams) -> None:
    """Refuse a draw this version cannot make. Raises: Unsupported, naming the field."""
    for name in _NOT_YET_DRAW:
        if getattr(draw, name) != getattr(_DEFAULT.draw, name):
            raise Unsupported(name)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse values out of range, and wishes this version does not honour.

    Raises: InvalidField or Unsupported, naming the field.
    """
    draw = params.draw
    _check_range("temperature", draw.temperature, 0.0, 100.0)
    _check_range("top_p", draw.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", draw.min_p, 0.0, 1.0)
    if draw.top_k < 0:
        raise InvalidField("top_k", f"must be 0 (all) or more, not {draw.top_k}")
    if params.seed not in INT64:
        raise InvalidField("seed", "must fit in a signed 64-bit integer")
    if params.n < 1:
        raise InvalidField("n", f"must be at least 1, not {params.n}")
    if params.n > 1:
        raise Unsupported("n", "above 1 is not supported by this server yet")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InvalidField("max_tokens", f"must be 0 or more, not {params.max_tokens}")
    if params.min_tokens < 0:
        raise InvalidField("min_tokens", f"must be 0 or more, not {params.min_tokens}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidField(
            "min_tokens", f"is {params.min_tokens}, above max_tokens {params.max_tokens}"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidField("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidField(
                "stop_token_ids", f"{token_id} is not in the vocabulary (0..{vocab_size - 1})"
            )
    for name in _NOT_YET:
        if getattr(params, name) != getattr(_DEFAULT, name):
            raise Unsupported(name)
    check_draw_supported(draw)


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidField(name, f"must be a number {bounds}, not {value}")
