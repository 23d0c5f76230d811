"""The JSON of a request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from services.bench.plan import Json, Planned

Backend = Literal["openai", "openai-chat"]


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Writes requests for one server.

    `sampling` are fields like temperature and ignore_eos that win over the workload's own; `extra`
    wins over everything, and "$MAX" in it stands for the request's max_tokens.
    """

    model: str
    backend: Backend
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, plan: Planned) -> bytes:
        """The body of one request."""
        fields: Json = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
        }
        if plan.num_choices > 1:
            fields["n"] = plan.num_choices
        if plan.seed is not None:
            fields["seed"] = plan.seed
        if self.backend == "openai-chat":
            fields["messages"] = list(plan.messages)
        else:
            fields["prompt"] = plan.text
        fields |= self.sampling
        fields |= {name: _with_max(value, plan.max_tokens) for name, value in self.extra.items()}
        return json.dumps({name: v for name, v in fields.items() if v is not None}).encode()


def as_asked(plan: Planned, extra: Mapping[str, Any]) -> Planned:
    """`plan` with as many and as long answers as the fields of `extra` ask for.

    What is no whole number above 0 changes nothing: "$MAX" is the plan's own, a limit that null
    takes out has no number, and the rest is for the server to refuse. Without `n` comes one answer.
    """
    max_tokens, num_choices = plan.max_tokens, plan.num_choices
    for name in ("max_tokens", "max_completion_tokens"):
        max_tokens = _count(extra.get(name), max_tokens)
    if "n" in extra:
        num_choices = _count(extra["n"], num_choices if extra["n"] is not None else 1)
    return replace(plan, max_tokens=max_tokens, num_choices=num_choices)


def _count(value: Any, default: int) -> int:
    return value if type(value) is int and value > 0 else default


def _with_max(value: Any, max_tokens: int) -> Any:
    text = json.dumps(value)
    number = str(max_tokens)
    return json.loads(text.replace('"$MAX"', number).replace("$MAX", number))
