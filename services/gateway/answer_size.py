"""How many log-probabilities one call may ask for: each is some 65 bytes of its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from services.gateway.call import Call, Prompt
from shared.errors import InvalidField
from shared.sampling import SamplingParams

MAX_LOGPROBS_IN_ALL: Final = 2**20


def bounded(
    call: Call, sampling: SamplingParams, prompts: Sequence[Prompt], max_model_len: int
) -> SamplingParams:
    """`sampling` as the call has it; answers of no given length get one for which there is room.

    Raises: InvalidField if the call could bring more than MAX_LOGPROBS_IN_ALL.
    """
    of_prompts = _num_of_prompts(call, sampling, prompts)
    a_token = _num_a_token(sampling, len(prompts))
    of_answers = a_token * (1 if sampling.max_tokens is None else sampling.max_tokens)
    if of_prompts + of_answers > MAX_LOGPROBS_IN_ALL:
        raise _too_many(call, of_prompts, of_answers)
    if sampling.max_tokens is not None or not a_token:
        return sampling
    max_tokens = (MAX_LOGPROBS_IN_ALL - of_prompts) // a_token
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    if max_tokens >= max_model_len - shortest:
        return sampling
    return replace(sampling, max_tokens=max_tokens)


def _num_of_prompts(call: Call, sampling: SamplingParams, prompts: Sequence[Prompt]) -> int:
    """A completion's choices tell those of their prompt, each by itself."""
    if sampling.prompt_logprobs is None:
        return 0
    num_told = sampling.n if call.best is None else call.best.num_told
    times = (call.echo and call.tells_logprobs) * num_told
    if call.returns_prompt_logprobs:
        times += 1 if call.chat is not None else num_told
    num_positions = sum(len(prompt.token_ids) for prompt in prompts)
    return max(1, times) * num_positions * (1 + sampling.prompt_logprobs)


def _num_a_token(sampling: SamplingParams, num_prompts: int) -> int:
    """Of the tokens that all answers generate at once."""
    return 0 if sampling.logprobs is None else num_prompts * sampling.n * (1 + sampling.logprobs)


def _too_many(call: Call, of_prompts: int, of_answers: int) -> InvalidField:
    if not call.tells_logprobs and of_answers >= of_prompts:
        name, fewer = "best_of", "lower it or max_tokens, or"
    elif call.returns_prompt_logprobs and of_prompts > of_answers:
        name, fewer = "prompt_logprobs", "lower it or n, or"
    else:
        is_top = call.chat is not None and call.sampling.logprobs
        name = "top_logprobs" if is_top else "logprobs"
        fewer = (
            "lower it, max_tokens or n, or"
            if is_top or call.sampling.logprobs
            else ("lower max_tokens or n, or")
        )
    less = "shorten the prompt" if call.chat is not None else "send fewer or shorter prompts"
    return InvalidField(
        name,
        f"makes {of_prompts + of_answers} log-probabilities, the likeliest tokens' included; at "
        f"most {MAX_LOGPROBS_IN_ALL} in one answer: {fewer} {less}",
    )
