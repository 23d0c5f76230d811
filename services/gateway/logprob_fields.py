"""Log-probabilities as JSON: OpenAI's two forms, and vLLM's of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.gateway.call import Endpoint
from services.gateway.token_names import TokenNames
from shared.ids import Ids
from shared.messages import PositionLogprobs

LOWEST: Final = -9999.0  # vLLM's and OpenAI's; JSON has no -Infinity


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of an answer, and the character at which it begins in the choice's text.

    `logprobs` None: nothing comes before it (a prompt's first).
    """

    token_id: int
    offset: int
    logprobs: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class LogprobFields:
    """The forms of one request: of each token, and of the `num_top` likeliest at its place."""

    endpoint: Endpoint
    num_top: int
    names: TokenNames

    def of(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        """A choice's `logprobs`; None if there is no token."""
        if not tokens:
            return None
        if self.endpoint == "chat":
            return {"content": [self._of_chat(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self.names.key(token.token_id) for token in tokens],
            "token_logprobs": [
                None if token.logprobs is None else _finite(token.logprobs.chosen)
                for token in tokens
            ],
            "top_logprobs": [self._by_key(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _by_key(self, token: PlacedToken) -> dict[str, float] | None:
        """The likeliest, and the token itself, as in vLLM; where two are written alike, one."""
        places = token.logprobs
        if places is None:
            return None
        key = self.names.key
        found = {key(token.token_id): _finite(places.chosen)}
        for token_id, logprob in zip(places.top_ids[: self.num_top], places.top, strict=False):
            found.setdefault(key(token_id), _finite(logprob))
        return found

    def _of_chat(self, token: PlacedToken) -> dict[str, Any]:
        places = token.logprobs
        if places is None:
            raise ValueError("a chat's answer has no prompt in it")
        best = list(zip(places.top_ids, places.top, strict=True))[: self.num_top]
        return {
            **self._entry(token.token_id, places.chosen),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in best],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.names.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self.names.bytes_of(token_id)),
        }


def prompt_logprobs(
    names: TokenNames, prompt: Ids, logprobs: Sequence[PositionLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, with ranks; the first has none."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, places in zip(prompt[1:], logprobs, strict=True):
        found = {str(token_id): _ranked(names, token_id, places.chosen, places.rank)}
        best = zip(places.top_ids, places.top, strict=True)
        for rank, (likely_id, logprob) in enumerate(best, start=1):
            found.setdefault(str(likely_id), _ranked(names, likely_id, logprob, rank))
        told.append(found)
    return told


def _ranked(names: TokenNames, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
