"""A check for schemathesis, which loads this file: what the schema allows, the server takes."""

import schemathesis
from schemathesis import GenerationMode

BETWEEN_FIELDS = (
    "max_tokens: must be at least 1 (0 only with echo or prompt_logprobs)",
    "above max_tokens",
    "best_of: is ",  # below n, or above it in a stream; not for beams
    "is for beams",
    "is not for beams",
    "with use_beam_search",
    "--max-pinned-share",  # enough is pinned
    "--scheduling-policy",  # a priority where there are none
    "deadline_s of ",  # it passed
    "must be 1 at temperature 0",
    "at most 1024 in one request",  # prompts times their answers
    "max_completion_tokens: is ",
    "stream_options: is for streams",
    "needs include_usage: true",
    "prompt_logprobs: is not streamed",
    "but echo brings the prompt's with logprobs",
    "top_logprobs: needs logprobs: true",
    "leaves no token to draw",
    "continue_final_message: needs",
    "prompt: and messages are both given",
    "shorten it",  # the prompt, or max_tokens beside it
    "shorten the prompt",
    "beside a prompt of",  # min_tokens
    "bad_words[",  # a text of spaces alone, or of too many tokens
    "not a fraction",  # 5.0, an integer to JSON Schema
    "is a fraction, but prompt",  # the same, behind an integer
    "Last-Event-ID: ",  # one of another stream
    "logit_bias: ",  # an id in decimal that is in no vocabulary
)
"""What a body is refused for though each of its fields is right: no schema says these rules."""


@schemathesis.check
def what_the_schema_allows_is_taken(_context, response, case) -> None:
    """Stricter than schemathesis' own: only the rules between fields excuse a refusal."""
    is_wrong_name = response.status_code == 404 and case.path.endswith(("{model}", "{id}"))
    if case.meta.generation.mode is not GenerationMode.POSITIVE or is_wrong_name:
        return
    if response.status_code >= 400:
        message = response.json()["error"]["message"]
        assert any(rule in message for rule in BETWEEN_FIELDS), message
    assert response.headers["x-request-id"]
