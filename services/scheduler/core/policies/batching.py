"""How the tokens of one step are shared out."""

from collections.abc import Iterable
from typing import Protocol

from services.scheduler.core.sequence import Sequence


class Shares(Protocol):
    """The token budget of one step while it is being shared out."""

    left: int
    """Tokens a prompt may still take."""

    def grant(self, sequence: Sequence) -> int:
        """Tokens a running sequence may compute in this step; 0 is none."""

    def grant_new(self, sequence: Sequence) -> int:
        """Tokens a sequence that starts now may compute in this step."""


class Batching(Protocol):
    """Opens the budget of a step."""

    def open(self, running: Iterable[Sequence]) -> Shares:
        """The budget of a step in which these sequences go on."""


class Mixed:
    """Decodes first, one token each; prompts are cut into chunks that fill the rest.

    Somebody starts only when tokens are left after all who run took what they can use; so there are
    never more running sequences than tokens in a step, and each has one whenever it can use it.
    Source: Agrawal et al. 2024 (Sarathi-Serve), chunked prefill without stalls.
    """

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget

    def open(self, running: Iterable[Sequence]) -> "MixedShares":
        """A budget in which one token is kept for every sequence that decodes."""
        decodes = sum(sequence.num_to_compute == 1 for sequence in running)
        return MixedShares(self.token_budget - decodes)


class MixedShares:
    """What is left for prompts; the decodes' tokens were set aside before."""

    def __init__(self, left: int) -> None:
        self.left = left

    def grant(self, sequence: Sequence) -> int:
        """1 for a decode; for a prompt under way as much of the rest as it can use."""
        return 1 if sequence.num_to_compute == 1 else self.grant_new(sequence)

    def grant_new(self, sequence: Sequence) -> int:
        """As much of the rest as the sequence can use; it was not there when the step opened."""
        granted = min(sequence.num_to_compute, self.left)
        self.left -= granted
        return granted
