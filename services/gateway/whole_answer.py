"""An answer in one piece, as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from services.gateway.answers import Answer, usage_fields
from services.gateway.call import Call
from services.gateway.echo import placed_prompt
from services.gateway.json_portions import LongList, portions
from services.gateway.logprob_fields import LogprobFields, PlacedTokens, prompt_logprobs
from services.gateway.progress import Progress
from services.gateway.token_names import TokenNames
from services.gateway.tokenizer import Tokenizer
from shared.messages import KVBill, PositionLogprobs


class WholeAnswer:
    """Tells a `Progress` that is over.

    `logprobs_of_prompt` has an entry a prompt, which is emptied when that has been told.
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        progress: Progress,
        tokenizer: Tokenizer,
        logprobs_of_prompt: list[Sequence[PositionLogprobs]],
        num_cached: int,
        bills: Sequence[KVBill] = (),
    ) -> None:
        self._call = call
        self._answer = answer
        self._progress = progress
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        names = TokenNames(tokenizer, as_ids=True) if call.tokens_as_ids else self._names
        self._logprobs = LogprobFields(call.endpoint, call.sampling.logprobs or 0, names)
        self._logprobs_of_prompt = logprobs_of_prompt
        self._num_cached = num_cached
        self._bills = bills

    def portions(self) -> Iterator[str]:
        """The body, once: what has been told of a choice or a prompt is not kept."""
        progress = self._progress
        usage = usage_fields(
            progress.num_prompt_tokens, progress.num_tokens, self._num_cached, self._bills
        )
        extras = self._about_prompt(0) if self._call.endpoint == "chat" else {}
        best = self._call.best
        told = range(len(progress.choices)) if best is None else progress.best(best.num_told)
        choices = LongList(self._choices(told), at_a_time=1)
        return portions(self._answer.whole(choices, usage, **extras))

    def _choices(self, told: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Each, when the one before it has become JSON."""
        before = 0
        for number, index in enumerate(told):
            prompt = index // self._call.sampling.n
            if prompt != before:
                self._logprobs_of_prompt[before] = ()
                before = prompt
            yield self._choice(number, index)

    def _choice(self, number: int, index: int) -> dict[str, Any]:
        """What the client has as its choice `number`."""
        choice = self._progress.choices[index]
        if choice.ending is None:
            raise RuntimeError("the answer is not over")
        delta = choice.delta()
        text, placed = delta.text, delta.placed
        if self._call.echo:
            text = self._progress.prompt_of(index).text + text
            placed = self._placed_prompt(index).before(placed)
        extras: dict[str, Any] = {}
        if self._call.return_token_ids:
            extras["token_ids"] = delta.token_ids
        if self._call.endpoint == "completion":
            extras |= self._about_prompt(index)
        logprobs = self._logprobs.of(placed) if self._call.tells_logprobs else None
        return self._answer.whole_choice(number, text, choice.ending, logprobs, **extras)

    def _placed_prompt(self, index: int) -> PlacedTokens:
        if not self._call.tells_logprobs:
            return PlacedTokens()
        prompt = self._progress.prompt_of(index)
        return placed_prompt(self._tokenizer, prompt, self._logprobs_of(index))

    def _about_prompt(self, index: int) -> dict[str, Any]:
        """What was asked for beside the answer."""
        told: dict[str, Any] = {}
        prompt_ids = self._progress.prompt_of(index).token_ids
        if self._call.return_token_ids:
            told["prompt_token_ids"] = prompt_ids
        if self._call.returns_prompt_logprobs:
            logprobs = self._logprobs_of(index)
            told["prompt_logprobs"] = prompt_logprobs(self._names, prompt_ids, logprobs)
        return told

    def _logprobs_of(self, index: int) -> Sequence[PositionLogprobs]:
        return self._logprobs_of_prompt[index // self._call.sampling.n]
