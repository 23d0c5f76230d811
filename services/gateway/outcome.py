"""What a request's log line says of it, beside path and status."""

from typing import Any, Final

from aiohttp import web

from services.gateway.generation import Generation

OUTCOME: Final = web.RequestKey("outcome", dict[str, Any])
"""The fields."""

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The client's X-Request-Id, or one of ours: echoed, never used inside."""


def outcome_of(generation: Generation) -> dict[str, Any]:
    """How an answer ended, or how far it came."""
    ttft_s = generation.ttft_s
    return {
        "id": generation.answer.request_id,
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached,
        "completion_tokens": generation.num_tokens,
        "finish": generation.finish_reasons,
        "code": generation.error_code,
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 1),
    }
