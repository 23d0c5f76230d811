"""What is refused at the door: wishes out of range, and requests that can never be served."""

import math
from dataclasses import dataclass, replace
from typing import Final

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.decoding import stop_ids_of
from services.scheduler.core.wire_size import MOST_BYTES, prompt_bytes, token_bytes
from shared.errors import InvalidField, NeverFits, PromptTooLong
from shared.geometry import blocks_in
from shared.ids import Ids
from shared.messages import ExecutorReady, Submit
from shared.sampling import MAX_BEAM_TOP, check_sampling, unknown_ids

INT32: Final = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the pool of the present executor can take, and what we may run."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: Ids
    config: SchedulerConfig
    num_pinned: int = 0
    """Blocks that are kept for pinned prefixes: each request must fit beside them."""

    @classmethod
    def of(cls, ready: ExecutorReady, config: SchedulerConfig) -> "Limits":
        """The limits of the executor that says this, and of our own settings."""
        return cls(
            ready.shape.vocab_size,
            ready.max_model_len,
            ready.block_size,
            ready.num_gpu_blocks,
            ready.eos_token_ids,
            config,
        )

    def beside(self, num_pinned: int) -> "Limits":
        """The same while so many blocks are pinned."""
        return replace(self, num_pinned=num_pinned) if num_pinned else self


def check_submit(submit: Submit, limits: Limits) -> int:
    """How many tokens this request may generate.

    Raises: InvalidField, Unsupported, PromptTooLong or NeverFits, naming the field.
    """
    _check_priority(submit, limits.config)
    if submit.deadline_s is not None and not 0 < submit.deadline_s < math.inf:
        raise InvalidField(
            "deadline_s", f"must be a finite number above 0 seconds, not {submit.deadline_s}"
        )
    check_sampling(submit.sampling, limits.vocab_size, limits.eos_token_ids)
    _check_width(submit, limits.config)
    _check_beams(submit, limits)
    if not math.isfinite(submit.age_s) or submit.age_s < 0:
        raise InvalidField("age_s", f"must be a finite number of seconds, not {submit.age_s}")
    if not submit.prompt:
        raise InvalidField("prompt", "is empty; send at least one token")
    _check_vocabulary("prompt", submit.prompt, limits.vocab_size)
    if len(submit.generated) > submit.sampling.n:
        raise InvalidField(
            "generated", f"has {len(submit.generated)} sequences, at most n = {submit.sampling.n}"
        )
    for generated in submit.generated:
        _check_vocabulary("generated", generated.token_ids, limits.vocab_size)
    _check_logprobs(submit)
    most = _most_tellable(submit, _most_tokens(submit, limits))
    if submit.sampling.min_tokens > most:
        raise InvalidField(
            "min_tokens",
            f"is {submit.sampling.min_tokens}; beside a prompt of {len(submit.prompt)} tokens at "
            f"most {most} can be generated",
        )
    return most


def _check_width(submit: Submit, config: SchedulerConfig) -> None:
    """All sequences of a request run together, each with a token in every step."""
    if submit.sampling.n > config.most_sequences:
        flag = "--max-num-seqs"
        if config.max_num_batched_tokens < config.max_num_seqs:
            flag = "--max-num-batched-tokens"
        raise InvalidField(
            "n", f"is {submit.sampling.n}; at most {config.most_sequences} sequences run ({flag})"
        )


def _check_beams(submit: Submit, limits: Limits) -> None:
    """So many beams must be able to go on from one, and something must be searched."""
    params = submit.sampling
    if not params.use_beam_search:
        return
    if params.max_tokens == 0:
        raise InvalidField("max_tokens", "is 0; a beam search is for at least one token")
    num_stop_ids = len(stop_ids_of(params, limits.eos_token_ids))
    most = min(limits.vocab_size, MAX_BEAM_TOP) - num_stop_ids
    if params.n > most:
        raise InvalidField(
            "n",
            f"is {params.n}; beside {num_stop_ids} tokens that end a text at most {max(most, 0)} "
            "beams can be searched here: ask for fewer, or for fewer stop_token_ids",
        )


def _check_logprobs(submit: Submit) -> None:
    """What a resubmission brings along is whole: one for each token if asked for, else none."""
    for generated in submit.generated:
        asked = len(generated.token_ids) if submit.sampling.logprobs is not None else 0
        if len(generated.logprobs) != asked:
            raise InvalidField(
                "generated", f"has {len(generated.logprobs)} logprobs where {asked} belong"
            )
    asked = len(submit.prompt) - 1 if submit.sampling.prompt_logprobs is not None else 0
    if submit.prompt_logprobs and len(submit.prompt_logprobs) != asked:
        raise InvalidField(
            "prompt_logprobs", f"has {len(submit.prompt_logprobs)} entries where {asked} belong"
        )


def _check_priority(submit: Submit, config: SchedulerConfig) -> None:
    if submit.priority not in INT32:
        raise InvalidField("priority", "must fit in a signed 32-bit integer")
    if submit.priority and config.scheduling_policy != "priority":
        raise InvalidField(
            "priority",
            f"is {submit.priority}, and this server serves first come, first served "
            "(--scheduling-policy fcfs): leave it out, or start the scheduler with "
            "--scheduling-policy priority",
        )


def _check_vocabulary(field: str, token_ids: Ids, vocab_size: int) -> None:
    """Raises: InvalidField, naming the first token id that the model does not know."""
    if unknown := unknown_ids(token_ids, vocab_size):
        raise InvalidField(
            field, f"token id {unknown[0]} is not in the vocabulary (0..{vocab_size - 1})"
        )


def _most_tokens(submit: Submit, limits: Limits) -> int:
    """The last token generated is never computed, so it needs no place in the pool.

    Nor does the last of a prompt that is only scored; one that is not even scored needs none.
    """
    num_prompt, max_tokens = len(submit.prompt), submit.sampling.max_tokens
    if num_prompt >= limits.max_model_len + (max_tokens == 0):
        raise PromptTooLong(num_prompt, limits.max_model_len)
    if max_tokens == 0 and submit.sampling.prompt_logprobs is None:
        return 0
    if max_tokens is not None and num_prompt + max_tokens > limits.max_model_len:
        raise PromptTooLong(num_prompt, limits.max_model_len, max_tokens)
    asked = 1 if max_tokens is None else max_tokens
    need = blocks_needed(num_prompt, asked, submit.sampling.n, limits.block_size)
    free = limits.num_blocks - limits.num_pinned
    if need > free:
        raise NeverFits(
            need, limits.num_blocks, limits.block_size, limits.num_pinned, submit.sampling.n
        )
    if max_tokens is not None:
        return max_tokens
    shared = num_prompt // limits.block_size
    each = shared + (free - shared) // submit.sampling.n
    fit = max(1, each * limits.block_size - num_prompt + 1)
    return min(limits.max_model_len - num_prompt, fit)


def _most_tellable(submit: Submit, most: int) -> int:
    """`most`, or as many tokens as all that may be asked of this request fits into one message."""
    left = MOST_BYTES - prompt_bytes(submit)
    tellable = left // token_bytes(submit)
    is_default = submit.sampling.max_tokens is None
    if left >= 0 and (tellable >= most or (is_default and tellable)):
        return min(most, tellable)
    num_bytes = prompt_bytes(submit) + token_bytes(submit) * (1 if is_default else most)
    sampling = submit.sampling
    field = "logprobs" if sampling.logprobs is not None else "max_tokens"
    if sampling.prompt_logprobs is not None and tellable < 1:
        field = "prompt_logprobs"
    raise InvalidField(
        field,
        f"the request could take {num_bytes / 2**20:.1f} MiB to tell, and one message has "
        f"{MOST_BYTES / 2**20:.0f}: ask for fewer log-probabilities, sequences or tokens",
    )


def need_of(submit: Submit, max_tokens: int, block_size: int) -> int:
    """Most blocks that this request ever holds, if it may generate so many tokens."""
    return blocks_needed(len(submit.prompt), max_tokens, submit.sampling.n, block_size)


def blocks_needed(num_prompt: int, max_tokens: int, n: int, block_size: int) -> int:
    """Blocks at the end of n answers: the full ones of the prompt once, then n tails.

    The last token of an answer is never computed.

    >>> blocks_needed(7, 3, 2, 4)
    5
    """
    shared = num_prompt // block_size
    if max_tokens <= 1:
        return blocks_in(num_prompt + max_tokens - 1, block_size)
    return shared + n * (blocks_in(num_prompt + max_tokens - 1, block_size) - shared)
