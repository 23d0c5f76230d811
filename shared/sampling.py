"""How a request wants its tokens chosen, when it ends, and which of that we honour."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from shared.errors import InvalidField
from shared.ids import Biases, Ids


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

    The order: `logit_bias` is added; `repetition_penalty` (over prompt and answer),
    `frequency_penalty` and `presence_penalty` (over the answer) are applied; what is not allowed,
    or would complete one of `bad_words`, is excluded; then temperature, top-k, top-p and min-p,
    each over what the one before kept. `temperature` 0 is greedy; `top_k` 0 keeps all.

    `allowed_token_ids` () allows all. Each of `bad_words` is a run of token ids that prompt and
    answer together must not end with after this draw; a run of one id bans that token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Biases = ()
    allowed_token_ids: Ids = ()
    bad_words: tuple[Ids, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Whether what was said already counts against a token."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it: a penalty, or a bad word of several."""
        return self.has_penalty or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes. `max_tokens` None means "as many as fit".

    `logprobs` and `prompt_logprobs` ask for log-probabilities of the raw distribution (before
    everything in `draw`): of each token, and of so many likeliest ones at its place (0: none).

    With `use_beam_search` nothing is drawn (`draw` is `NO_DRAW`): the `n` texts with the highest
    sum of log-probabilities, divided by length ** `length_penalty`, are searched with `n` beams, as
    transformers does it; eos and `stop_token_ids` end a beam.
    """

    draw: DrawParams = DrawParams()
    seed: int = 0
    n: int = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Ids = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


MAX_N: Final = 128  # OpenAI's
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGPROBS: Final = 20  # OpenAI's and vLLM's
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0  # OpenAI's
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 32
INT64: Final = range(-(2**63), 2**63)

MAX_LENGTH_PENALTY: Final = 10.0
MAX_EOS_TOKEN_IDS: Final = 64
MAX_BEAM_TOP: Final = MAX_N + MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
"""Most likeliest tokens that one place of a beam may be asked for (`num_beam_top`)."""

NO_DRAW: Final = DrawParams(temperature=0.0)
"""The only `draw` of a beam search."""
_DEFAULT: Final = SamplingParams()


def check_sampling(params: SamplingParams, vocab_size: int, eos_token_ids: Ids = ()) -> None:
    """Refuse values out of range, wishes this version does not honour, and draws from nothing.

    Raises: InvalidField or Unsupported, naming the field.
    """
    if params.seed not in INT64:
        raise InvalidField("seed", "must fit in a signed 64-bit integer")
    if params.n < 1:
        raise InvalidField("n", f"must be at least 1, not {params.n}")
    if params.n > MAX_N:
        raise InvalidField("n", f"must be at most {MAX_N}, not {params.n}")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InvalidField("max_tokens", f"must be 0 or more, not {params.max_tokens}")
    if params.min_tokens < 0:
        raise InvalidField("min_tokens", f"must be 0 or more, not {params.min_tokens}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidField(
            "min_tokens", f"is {params.min_tokens}, above max_tokens {params.max_tokens}"
        )
    _check_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted: int | None = getattr(params, name)
        if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
            raise InvalidField(name, f"must be from 0 to {MAX_LOGPROBS}, not {wanted}")
    _check_beams(params)
    check_draw(params.draw, vocab_size)
    _check_something_left(params, vocab_size, eos_token_ids)


def num_beam_top(params: SamplingParams, num_stop_ids: int) -> int:
    """Likeliest tokens of each place that a beam search looks at.

    Of so many, `n` at least do not end a beam; whoever ends one must be among the best `n`.

    Args:
        num_stop_ids: how many tokens end a sequence, `stop_token_ids` included.
    """
    return max(params.n + num_stop_ids, params.logprobs or 0)


def _check_beams(params: SamplingParams) -> None:
    _check_range("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if not params.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(params, name) != getattr(_DEFAULT, name):
                raise InvalidField(name, "is for beams: set use_beam_search or leave it out")
        return
    for field in fields(DrawParams):
        if getattr(params.draw, field.name) != getattr(NO_DRAW, field.name):
            advice = "must be 0" if field.name == "temperature" else "draws nothing: leave it out"
            raise InvalidField(field.name, f"with use_beam_search, {advice}")


def check_draw(draw: DrawParams, vocab_size: int) -> None:
    """Refuse values out of range. Raises: InvalidField, naming the field."""
    check_numbers(draw)
    biased = tuple([token_id for token_id, _ in draw.logit_bias])
    _check_ids("logit_bias", biased, MAX_BIASES, vocab_size)
    if len(set(biased)) < len(biased):
        raise InvalidField("logit_bias", "names a token id twice")
    for token_id, bias in draw.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidField(
                "logit_bias",
                f"of token {token_id} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"not {bias}",
            )
    _check_ids("allowed_token_ids", draw.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, vocab_size)
    if len(draw.bad_words) > MAX_BAD_WORDS:
        raise InvalidField("bad_words", f"takes at most {MAX_BAD_WORDS}, not {len(draw.bad_words)}")
    for word in draw.bad_words:
        if not word:
            raise InvalidField("bad_words", "holds a word without tokens")
        _check_ids("bad_words", word, MAX_BAD_WORD_TOKENS, vocab_size)


def check_numbers(draw: DrawParams) -> None:
    """Refuse what is out of range but for its lists. Raises: InvalidField, naming the field."""
    _check_range("temperature", draw.temperature, 0.0, 100.0)
    _check_range("top_p", draw.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", draw.min_p, 0.0, 1.0)
    if draw.top_k < 0:
        raise InvalidField("top_k", f"must be 0 (all) or more, not {draw.top_k}")
    _check_range("presence_penalty", draw.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", draw.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", draw.repetition_penalty, 0.0, 100.0, open_low=True)


def _check_ids(name: str, token_ids: Ids, most: int, vocab_size: int) -> None:
    if len(token_ids) > most:
        raise InvalidField(name, f"takes at most {most} token ids, not {len(token_ids)}")
    if unknown := unknown_ids(token_ids, vocab_size):
        raise InvalidField(name, f"{unknown[0]} is not in the vocabulary (0..{vocab_size - 1})")


def unknown_ids(token_ids: Collection[int], vocab_size: int) -> list[int]:
    """Those beyond 0 .. vocab_size - 1, in their order.

    >>> unknown_ids((3, -1, 8), 8)
    [-1, 8]
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return []  # nearly always, and quickly
    return [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]


def _check_something_left(params: SamplingParams, vocab_size: int, eos_token_ids: Ids) -> None:
    """Refuse what bans every token, always or until `min_tokens`."""
    barred = {word[0] for word in params.draw.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        barred.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    allowed = set(params.draw.allowed_token_ids)
    if (allowed and not allowed - barred) or len(barred) >= vocab_size:
        name = "allowed_token_ids" if allowed else "bad_words"
        raise InvalidField(
            name, "leaves no token to draw beside bad_words and, up to min_tokens, the stop tokens"
        )


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    if not low <= value <= high or (open_low and value == low):  # no NaN either
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidField(name, f"must be a number {bounds}, not {value:.15g}")
