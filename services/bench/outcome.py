"""The numbers of one request: how long until the first token, between tokens, and in all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.bench.answer import Answer, Choice, read_answer
from services.bench.plan import Planned
from services.bench.recording import Recording

CountedBy = Literal["usage", "tokenizer"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request that came back whole.

    `tpots_s` and `itls_s`: (last - first text) / (tokens - 1) of each choice that had more than one
    event and token; every gap between two texts of one choice. `events_s`: the time of each text.
    """

    start_s: float
    end_s: float
    ttft_s: float
    tpots_s: tuple[float, ...]
    itls_s: tuple[float, ...]
    events_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    num_choices: int
    counted_by: CountedBy
    is_of_asked_length: bool
    texts: tuple[str, ...]

    @property
    def e2el_s(self) -> float:
        """From sending the request to the end of its answer."""
        return self.end_s - self.start_s

    @property
    def normalized_s(self) -> float:
        """End-to-end latency over output length (of one choice). Kwon et al. 2023, section 6.1."""
        return self.e2el_s / max(1.0, self.output_tokens / self.num_choices)

    @property
    def slowest_tpot_s(self) -> float:
        """The worst of its choices; 0 where no choice has two tokens."""
        return max(self.tpots_s, default=0.0)


@dataclass(frozen=True, slots=True)
class Failed:
    """One request that did not come back whole; it counts nowhere but among the errors."""

    start_s: float
    end_s: float
    kind: str
    story: str


def judge(plan: Planned, recording: Recording, count: Callable[[str], int]) -> Outcome | Failed:
    """The numbers of a recording that has ended; `count` counts the tokens of an answer's text."""
    if recording.start_s is None or recording.end_s is None:
        raise ValueError("a recording that has not ended has no outcome")
    answer = read_answer(recording, plan.num_choices)
    if answer.failure is not None:
        return Failed(recording.start_s, recording.end_s, *answer.failure)
    choices = [answer.choices[index] for index in sorted(answer.choices)]
    tokens, counted_by = _tokens(answer, choices, count)
    spoken = [(choice, of_it) for choice, of_it in zip(choices, tokens, strict=True) if of_it]
    output_tokens = round(sum(tokens))
    return Outcome(
        start_s=recording.start_s,
        end_s=recording.end_s,
        ttft_s=min(choice.times_s[0] for choice in choices if choice.times_s) - recording.start_s,
        tpots_s=tuple(
            (choice.times_s[-1] - choice.times_s[0]) / (of_it - 1)
            for choice, of_it in spoken
            if of_it > 1 and len(choice.times_s) > 1
        ),
        itls_s=tuple(
            later - earlier
            for choice in choices
            for earlier, later in zip(choice.times_s, choice.times_s[1:], strict=False)
        ),
        events_s=tuple(time for choice in choices for time in choice.times_s),
        prompt_tokens=_number(answer, "prompt_tokens") or plan.prompt_tokens,
        output_tokens=output_tokens,
        num_choices=len(choices),
        counted_by=counted_by,
        is_of_asked_length=output_tokens == plan.max_tokens * plan.num_choices,
        texts=tuple(choice.text for choice in choices),
    )


def _tokens(
    answer: Answer, choices: Sequence[Choice], count: Callable[[str], int]
) -> tuple[list[float], CountedBy]:
    """Tokens of each choice. The server counts them together: they are shared out by events.

    Some servers report one choice of several; no answer has fewer tokens than events, so then the
    events count.
    """
    events = [len(choice.times_s) for choice in choices]
    reported = _number(answer, "completion_tokens")
    if reported is None:
        return [float(count(choice.text)) for choice in choices], "tokenizer"
    total = max(reported, sum(events)) if len(choices) > 1 else reported
    return [total * of_it / sum(events) for of_it in events], "usage"


def _number(answer: Answer, name: str) -> int | None:
    number = (answer.usage or {}).get(name)
    return number if isinstance(number, int) and number > 0 else None
