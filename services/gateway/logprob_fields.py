"""Log-probabilities as JSON: OpenAI's two forms, and vLLM's of a prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from services.gateway.call import Endpoint
from services.gateway.json_portions import PORTION, LongList
from services.gateway.token_names import TokenNames
from shared.ids import Ids
from shared.messages import PositionLogprobs

LOWEST: Final = -9999.0  # vLLM's and OpenAI's, for what JSON has no number


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Tokens of an answer, and the character at which each begins in the choice's text.

    `logprobs` None: nothing comes before it (a prompt's first). `offsets` are read once.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[PositionLogprobs | None] = ()
    offsets: Iterable[int] = ()

    def before(self, others: "PlacedTokens") -> "PlacedTokens":
        """Both, as one."""
        return PlacedTokens(
            (*self.token_ids, *others.token_ids),
            (*self.logprobs, *others.logprobs),
            chain(self.offsets, others.offsets),
        )


@dataclass(frozen=True, slots=True)
class LogprobFields:
    """The forms of one request: of each token, and of the `num_top` likeliest at its place."""

    endpoint: Endpoint
    num_top: int
    names: TokenNames

    def of(self, tokens: PlacedTokens) -> dict[str, Any] | None:
        """A choice's `logprobs`, its arrays long ones if they are long; None if it has no token."""
        token_ids, logprobs = tokens.token_ids, tokens.logprobs
        count = len(token_ids)
        if not count:
            return None
        if self.endpoint == "chat":
            content = _array(count, map(self._of_chat, token_ids, logprobs))
            return {"content": content, "refusal": None}
        return {
            "tokens": _array(count, map(self.names.key, token_ids)),
            "token_logprobs": _array(count, map(_chosen, logprobs)),
            "top_logprobs": _array(count, map(self._by_key, token_ids, logprobs)),
            "text_offset": _array(count, tokens.offsets),
        }

    def _by_key(self, token_id: int, places: PositionLogprobs | None) -> dict[str, float] | None:
        """The likeliest, and the token itself, as in vLLM; where two are written alike, one."""
        if places is None:
            return None
        key = self.names.key
        found = {key(token_id): _finite(places.chosen)}
        for likely_id, logprob in zip(places.top_ids[: self.num_top], places.top, strict=False):
            found.setdefault(key(likely_id), _finite(logprob))
        return found

    def _of_chat(self, token_id: int, places: PositionLogprobs | None) -> dict[str, Any]:
        if places is None:
            raise ValueError("a chat's answer has no prompt in it")
        best = list(zip(places.top_ids, places.top, strict=False))[: self.num_top]
        return {
            **self._entry(token_id, places.chosen),
            "top_logprobs": [self._entry(likely_id, logprob) for likely_id, logprob in best],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.names.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self.names.bytes_of(token_id)),
        }


def prompt_logprobs(
    names: TokenNames, prompt: Ids, logprobs: Sequence[PositionLogprobs]
) -> LongList:
    """vLLM's `prompt_logprobs`: by token id, with ranks; the first has none."""

    def ranks(token_id: int, places: PositionLogprobs) -> dict[str, Any]:
        found = {str(token_id): _ranked(names, token_id, places.chosen, places.rank)}
        best = zip(places.top_ids, places.top, strict=False)
        for rank, (likely_id, logprob) in enumerate(best, start=1):
            found.setdefault(str(likely_id), _ranked(names, likely_id, logprob, rank))
        return found

    return LongList(chain((None,), map(ranks, prompt[1:], logprobs)))


def _array(count: int, items: Iterable[Any]) -> list[Any] | LongList:
    return LongList(items) if count > PORTION else list(items)


def _chosen(places: PositionLogprobs | None) -> float | None:
    return None if places is None else _finite(places.chosen)


def _ranked(names: TokenNames, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}


def _finite(logprob: float) -> float:
    return logprob if LOWEST < logprob < -LOWEST else LOWEST
