"""The forms of answers, for /openapi.json: nothing is built from these (`answers.py` does that)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort"]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokens(_Form):
    """What was not computed again."""

    cached_tokens: int = Field(description="of the prompts; 0 if none was found in the cache")


class UsageSoFar(_Form):
    """Tokens read, each prompt once, and generated, by all answers, each to its stop string."""

    prompt_tokens: int
    completion_tokens: int = Field(description="with best_of also those of answers not told")
    total_tokens: int


class KVBill(_Form):
    """Blocks of the KV pool that an answer took."""

    peak_blocks: int = Field(
        description="most that it held at once; of several prompts' answers, the one with most"
    )
    peak_saved_blocks: int = Field(
        description="most that it would have held beyond those without sharing; likewise"
    )
    sharing_saved: float = Field(
        description=(
            "blocks without sharing minus blocks used, over blocks without sharing, each summed "
            "over its steps; of several prompts' answers the mean by their size at the peak"
        )
    )
    copied_blocks: int = Field(description="copied because they were shared and written to")
    preemptions_swap: int
    preemptions_recompute: int
    swapped_bytes: int = Field(description="to the CPU pool and back")


class Usage(UsageSoFar):
    """The same, whole; in a stream it stands beside the empty choices at its end."""

    prompt_tokens_details: PromptTokens
    kv_bill: KVBill | None = Field(None, description="where the server has --enable-kv-bill")


class RankedLogprob(_Form):
    """A token at its place in a prompt."""

    logprob: float
    rank: int = Field(description="1 is the likeliest")
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class CompletionLogprobs(_Form):
    """Log-probabilities of the raw distribution; -9999.0 stands for minus infinity."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="the character at which each token begins")


class CompletionChoice(_Form):
    """One answer to one prompt; `index` counts through the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="what of stop or stop_token_ids ended it")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="with prompt_logprobs")


class CompletionAnswer(_Form):
    """A completion in one piece."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(_Form):
    """What is new of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None = Field(description="null until its end")
    stop_reason: str | int | None = Field(None, description="with finish_reason")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(None, description="in the first, likewise")


class CompletionChunk(_Form):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice] = Field(description="none in the last, with the usage")
    usage: Usage | UsageSoFar | None = Field(None, description="with stream_options.include_usage")


class LikelyToken(_Form):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(LikelyToken):
    """A token of an answer."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Form):
    """Log-probabilities of the raw distribution; -9999.0 stands for minus infinity."""

    content: list[ChatToken] | None
    refusal: None


class ChatMessage(_Form):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Form):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="what of stop or stop_token_ids ended it")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")


class ChatAnswer(_Form):
    """A chat's answer in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="with prompt_logprobs")


class ChatDelta(_Form):
    """What is new of a message: its role in the first event, then text, in the last nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Form):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None = Field(description="null until its end")
    stop_reason: str | int | None = Field(None, description="with finish_reason")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")


class ChatChunk(_Form):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="none in the last, with the usage")
    usage: Usage | UsageSoFar | None = Field(None, description="with stream_options.include_usage")
    prompt_token_ids: list[int] | None = Field(
        None, description="in the first, with return_token_ids"
    )


class ModelCard(_Form):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None = Field(description="null until a scheduler said it")


class ModelList(_Form):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(_Form):
    """A text's tokens."""

    count: int
    max_model_len: int | None = Field(description="null until a scheduler said it")
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Form):
    """The tokens' text."""

    prompt: str


class VersionAnswer(_Form):
    """The server's version."""

    version: str


class Ready(_Form):
    """This gateway can serve."""

    status: Literal["idle", "busy"]


class NotReady(_Form):
    """What is missing."""

    status: Literal["loading", "stalled", "draining"]
    phase: str


class Live(_Form):
    """This process answers."""

    status: Literal["live"]


class ErrorDetail(_Form):
    """Who, what, the limit, and what to do."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="the field to change, such as messages[3].content")
    code: str


class ErrorAnswer(_Form):
    """OpenAI's form; also as an event in a stream that fails, followed by [DONE]."""

    error: ErrorDetail
