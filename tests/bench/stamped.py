"""Recordings with the times a test gives them."""

import json

from services.bench.outcome import judge
from services.bench.plan import Planned
from services.bench.recording import Recording

DONE = "[DONE]"


def event(content):
    text = content if isinstance(content, str) else json.dumps(content)
    return f"data: {text}\n\n".encode()


def said(text, index=0, finish=None):
    """A chunk of a chat completion."""
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def used(completion_tokens, prompt_tokens=10):
    """The chunk with the usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": usage}


def recording(*events, start=0.0, end=None, status=200, failure=None):
    """`events`: (time, content or bytes)."""
    chunks = [(time, raw if isinstance(raw, bytes) else event(raw)) for time, raw in events]
    last = chunks[-1][0] if chunks else start
    return Recording(
        start_s=start,
        end_s=last if end is None else end,
        status=status,
        content_type="text/event-stream",
        chunks=chunks,
        failure=failure,
    )


def plan(max_tokens=4, num_choices=1):
    message = {"role": "user", "content": "hello"}
    return Planned((message,), max_tokens, prompt_tokens=5, num_choices=num_choices)


def judged(*events, max_tokens=4, num_choices=1, count=len, **wish):
    """The outcome; tokens that the server does not count are characters."""
    return judge(plan(max_tokens, num_choices), recording(*events, **wish), count)
