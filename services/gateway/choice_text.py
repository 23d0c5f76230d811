"""One choice's tokens to the text its client sees: characters whole, stop strings never."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.detokenizer import Detokenizer
from services.gateway.stop_strings import StopScanner, StopStrings
from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a request asked of its text.

    `silent_ids` are the tokens that end the sequence: they count, but are no text. Stop strings
    are looked for only in what comes after the first `min_tokens` tokens (vLLM does the same);
    `includes_stop` leaves the one that was found in the text. `has_offsets` says that it matters
    where in the text each token begins.
    """

    stop: StopStrings | None
    silent_ids: Collection[int]
    min_tokens: int
    includes_stop: bool = False
    has_offsets: bool = False


class ChoiceText:
    """A pure function of the tokens fed so far, in whatever portions they came."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._rules = rules
        stop = rules.stop
        self._scanner = StopScanner(stop, rules.includes_stop) if stop is not None else None
        self._num_decoded = 0
        self._num_out = 0
        self._is_over = False
        self._begins: list[int] = []
        self.num_tokens = 0
        """Tokens fed, up to the one that completed a stop string."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; nothing comes after it."""
        return self._scanner.matched if self._scanner is not None else None

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text these tokens let out."""
        rules = self._rules
        if self._scanner is None and not rules.has_offsets:
            self.num_tokens += len(token_ids)
            silent_ids = rules.silent_ids
            return self._detokenizer.feed([one for one in token_ids if one not in silent_ids])
        parts = []
        for token_id in token_ids:
            if self.matched is not None:
                break
            parts.append(self._feed_one(token_id))
        return "".join(parts)

    def _feed_one(self, token_id: int) -> str:
        is_silent = token_id in self._rules.silent_ids
        self.num_tokens += 1
        if self._rules.has_offsets:
            self._begins.append(self._num_decoded + self._leaves_half(token_id, is_silent))
        if is_silent:
            return ""
        text = self._detokenizer.feed((token_id,))
        self._num_decoded += len(text)
        if self._scanner is not None and self.num_tokens > self._rules.min_tokens:
            text = self._scanner.feed(text)
            self._is_over = self._scanner.matched is not None
        self._num_out += len(text)
        return text

    def _leaves_half(self, token_id: int, is_silent: bool) -> bool:
        """Whether a U+FFFD comes before this token, of what was to be a character."""
        if is_silent:
            return self._detokenizer.holds_half
        return self._detokenizer.breaks_off(token_id)

    @property
    def num_placed(self) -> int:
        """How many of the tokens that `take_offsets` has still to tell of it can tell of now."""
        if self._is_over:
            return len(self._begins)
        return bisect_right(self._begins, self._num_out)

    def take_offsets(self) -> list[int]:
        """Where the next tokens begin in the text, in characters: of all that is known of.

        A character split over tokens begins at the first of them. A token of which all is held
        back waits: if it proves to be in a stop string, it begins where the text ends.
        """
        count = self.num_placed
        offsets = [min(begin, self._num_out) for begin in self._begins[:count]]
        del self._begins[:count]
        return offsets

    def finish(self) -> str:
        """The sequence ended: what was held back, unless a stop string cut it off."""
        self._is_over = True
        if self.matched is not None:
            return ""
        text = self._detokenizer.flush()
        if self._scanner is not None:
            text = self._scanner.feed(text) + self._scanner.flush()
        self._num_out += len(text)
        return text
