"""The error tree. Every message says who, what, the limit, and what to do.

SplitflapError
|-- RequestError        the client asked for something we cannot do: a 4xx, or `Refused`
|   |-- InvalidField
|   |-- Unsupported
|   |-- PromptTooLong
|   `-- NeverFits
|-- WireError           a peer sent bytes we do not understand: dropped and counted
|-- StartError          the process cannot start as configured: exit status 2
`-- InvariantBroken     our own bug: the process stops with its story
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """The `code` of an error answer and of `Refused`; HTTP statuses are the gateway's business."""

    INVALID = "invalid_value"
    UNSUPPORTED = "unsupported_parameter"
    CONTEXT_LENGTH = "context_length_exceeded"
    NEVER_FITS = "request_too_large"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline_exceeded"
    PREFIX_BUDGET = "prefix_budget_exceeded"
    UNKNOWN_PREFIX = "prefix_not_found"
    UNAVAILABLE = "service_unavailable"
    UNKNOWN_REQUEST = "unknown_request"
    UNKNOWN_STREAM = "stream_not_found"
    MOVED = "stream_moved"
    DRAINING = "gateway_draining"
    INTERNAL = "internal_error"


class SplitflapError(Exception):
    """Root of everything we raise on purpose."""


class RequestError(SplitflapError):
    """The client's request cannot be served; `param` names the field where one is to blame."""

    code = ErrorCode.INVALID

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidField(RequestError):
    """A field has a wrong type or a value out of range."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param)


class Unsupported(RequestError):
    """A field asks for something this server does not do; it is refused, never ignored."""

    code = ErrorCode.UNSUPPORTED

    def __init__(
        self, param: str, message: str = "is not supported by this server yet; leave it out"
    ) -> None:
        super().__init__(f"{param} {message}", param)


class PromptTooLong(RequestError):
    """The prompt (and the tokens asked for) exceed the longest sequence the server takes."""

    code = ErrorCode.CONTEXT_LENGTH

    def __init__(self, num_tokens: int, max_model_len: int, max_tokens: int = 0) -> None:
        asked = f" and {max_tokens} more were asked for" if max_tokens else ""
        fit = "at most" if max_tokens else "with one token to generate, fewer than"
        super().__init__(
            f"prompt has {num_tokens} tokens{asked}; {fit} {max_model_len} fit "
            f"(--max-model-len): shorten it{' or lower max_tokens' if max_tokens else ''}",
            "max_tokens" if max_tokens and num_tokens < max_model_len else "prompt",
        )


class NeverFits(RequestError):
    """The request needs more blocks than the whole pool has beside its pinned prefixes."""

    code = ErrorCode.NEVER_FITS

    def __init__(
        self,
        need_blocks: int,
        have_blocks: int,
        block_size: int,
        pinned_blocks: int = 0,
        num_answers: int = 1,
    ) -> None:
        pinned, advice = "", "lower n, " if num_answers > 1 else ""
        if pinned_blocks:
            pinned = f", {pinned_blocks} of them for pinned prefixes"
            advice += "delete a prefix (/v1/prefixes), "
        super().__init__(
            f"the request needs {need_blocks} blocks of {block_size} tokens; the KV pool has "
            f"{have_blocks}{pinned}: shorten the prompt, lower max_tokens, {advice}or give the "
            "pool more memory (--kv-cache-memory-bytes)",
            "max_tokens",
        )


class WireError(SplitflapError):
    """Bytes from a peer that are no message of this protocol; `reason` is a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class StartError(SplitflapError):
    """The process cannot start as configured; the message says what to change."""


class InvariantBroken(SplitflapError):
    """A law of this program does not hold: a bug of ours, never the client's fault."""
