"""One request as the gateway means to carry it out: what stands between HTTP and the scheduler."""

import re
from dataclasses import dataclass
from typing import Literal

from shared.ids import Ids
from shared.sampling import SamplingParams

Endpoint = Literal["completion", "chat"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream looks. `continuous_usage` puts a usage so far into every chunk.

    `resumable`: its client may come back, so its request is kept when it leaves.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the model's template makes a prompt of.

    A message is {"role": ..., "content": text}, its content parts joined already.
    """

    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """Of the answers that are generated to a prompt, only the `num_told` likeliest are told.

    `hides_logprobs`: those of the answers are asked for only to find them.
    """

    num_told: int
    hides_logprobs: bool


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asked for.

    `prompts` are a completion's, each a text or token ids: every one is a request of its own at
    the scheduler and gets `sampling.n` choices, of which `best` may leave some out. A chat has one
    prompt, of `chat`. `sampling` is
    whole but for `bad_words`, which are texts until a tokenizer has seen them; what stands in
    `sampling.draw.bad_words` before that are the client's `banned_token_ids`. `model` None is the
    model that is served. `stream` None: in one piece. `max_tokens_name` is what the client calls
    `sampling.max_tokens`. `is_seeded`: the seed is the client's, the same for each prompt; else it
    was drawn, and prompts that are alike must not get answers that are.

    `echo` puts the prompt before the text; with `sampling.logprobs` it brings the prompt's
    logprobs along, for which `sampling.prompt_logprobs` is set too. `returns_prompt_logprobs` is
    the field of that name, vLLM's, with its own form. `tokens_as_ids` writes `token_id:5` for a
    token in log-probabilities. `cache_salt` and the API key are with whom blocks may be shared.
    `deadline_s` counts from the request's arrival.
    """

    endpoint: Endpoint
    model: str | None
    sampling: SamplingParams
    prompts: tuple[str | Ids, ...] = ()
    chat: Chat | None = None
    add_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    echo: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    returns_prompt_logprobs: bool = False
    stream: StreamOptions | None = None
    max_tokens_name: str = "max_tokens"
    is_seeded: bool = True
    best: Best | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None

    @property
    def tells_logprobs(self) -> bool:
        """Whether the client asked for log-probabilities of the answers."""
        is_hidden = self.best is not None and self.best.hides_logprobs
        return self.sampling.logprobs is not None and not is_hidden

    def in_client_words(self, message: str, param: str | None) -> tuple[str, str | None]:
        """An error's message and param that speak of our fields, in the client's names."""
        if param == "prompt" and self.chat is not None:
            param = "messages"  # the prompt is made of them
        if self.sampling.draw.bad_words and not self.bad_words:
            message = re.sub(r"\bbad_words\b", "banned_token_ids", message)
            param = "banned_token_ids" if param == "bad_words" else param
        if param == "max_tokens":
            param = self.max_tokens_name
        if param == "n" and self.best is not None:
            param = "best_of"
            message = re.sub(r"\bn\b", param, message)
        if self.best is not None:
            message = message.replace("lower n,", "lower best_of,")
        return re.sub(r"\bmax_tokens\b", self.max_tokens_name, message), param


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as tokens; `text` is what `echo` repeats."""

    token_ids: Ids
    text: str
