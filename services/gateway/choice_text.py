"""One choice's tokens to the text its client sees: characters whole, stop strings never."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.detokenizer import Detokenizer
from services.gateway.stop_strings import StopScanner, StopStrings
from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a request asked of its text.

    `silent_ids` are the tokens that end the sequence: they count, but are no text. Stop strings
    are looked for only in what comes after the first `min_tokens` tokens (vLLM does the same).
    """

    stop: StopStrings | None
    silent_ids: Collection[int]
    min_tokens: int


class ChoiceText:
    """A pure function of the tokens fed so far, in whatever portions they came."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._rules = rules
        self._scanner = StopScanner(rules.stop) if rules.stop is not None else None
        self.num_tokens = 0
        """Tokens fed, up to the one that completed a stop string."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; nothing comes after it."""
        return self._scanner.matched if self._scanner is not None else None

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text these tokens let out."""
        rules = self._rules
        if self._scanner is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(
                token_id for token_id in token_ids if token_id not in rules.silent_ids
            )
        parts = []
        for token_id in token_ids:
            if self._scanner.matched is not None:
                break
            self.num_tokens += 1
            if token_id in rules.silent_ids:
                continue
            text = self._detokenizer.feed((token_id,))
            parts.append(text if self.num_tokens <= rules.min_tokens else self._scanner.feed(text))
        return "".join(parts)

    def finish(self) -> str:
        """The sequence ended: what was held back, unless a stop string cut it off."""
        if self._scanner is None:
            return self._detokenizer.flush()
        if self._scanner.matched is not None:
            return ""
        return self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush()
