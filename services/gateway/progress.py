"""All choices of one answer, and how far they are."""

from collections import Counter
from collections.abc import Sequence

from services.gateway.answer_stream import Piece
from services.gateway.call import Call, Prompt
from services.gateway.choice import Choice, ChoiceRules
from services.gateway.choice_text import ChoiceText, TextRules
from services.gateway.stop_strings import StopStrings
from services.gateway.tokenizer import Tokenizer
from shared.ids import Ids


class Progress:
    """Choice i of prompt p has the index p * n + i."""

    def __init__(
        self,
        call: Call,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        eos_token_ids: Ids,
        stream_interval: int = 1,
    ) -> None:
        self.prompts = prompts
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._n = call.sampling.n
        text_rules = _text_rules(call, eos_token_ids)
        self.choices: list[Choice] = []
        for prompt in prompts:
            rules = ChoiceRules(
                frozenset(call.sampling.stop_token_ids),
                stream_interval,
                call.sampling.logprobs is not None,
                len(prompt.text) if call.echo else 0,
            )
            self.choices += [
                Choice(ChoiceText(tokenizer, text_rules), rules) for _ in range(self._n)
            ]
        self._num_open = len(self.choices)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    @property
    def num_tokens(self) -> int:
        """Tokens generated, each choice up to its stop string."""
        return sum(choice.num_tokens for choice in self.choices)

    def finish_reasons(self, of_open: str) -> str:
        """For the log: a word a choice, or how many there are of each; `of_open` have no end."""
        reasons = Counter(
            choice.ending.finish_reason if choice.ending else of_open for choice in self.choices
        )
        return ",".join(
            reason if count == 1 else f"{reason}*{count}" for reason, count in reasons.items()
        )

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self._n]

    def best(self, num_told: int) -> list[int]:
        """The choices that are told if only so many a prompt are: the likeliest, best first.

        OpenAI's measure, the mean log-probability of a token; of equals the first.
        """
        told: list[int] = []
        for first in range(0, len(self.choices), self._n):
            indices = range(first, first + self._n)
            ranked = sorted(indices, key=lambda index: -self.choices[index].mean_logprob)
            told += ranked[:num_told]
        return told

    def index_of(self, number: int, piece: Piece) -> int:
        """The choice that a piece of prompt `number` belongs to."""
        return number * self._n + piece.sequence

    def feed(self, index: int, piece: Piece) -> Choice:
        """Take what came of a choice. Raises: Failure if it ended with an error."""
        choice = self.choices[index]
        if choice.ending is None:
            choice.feed(piece)
            self._num_open -= choice.ending is not None
        return choice


def _text_rules(call: Call, eos_token_ids: Ids) -> TextRules:
    sampling = call.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    silent = frozenset(() if sampling.ignore_eos else eos_token_ids)
    silent = silent - stop_ids if call.include_stop_str_in_output else silent | stop_ids
    return TextRules(
        StopStrings(call.stop) if call.stop else None,
        silent,
        sampling.min_tokens,
        call.include_stop_str_in_output,
        sampling.logprobs is not None,
    )
