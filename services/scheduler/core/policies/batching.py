"""How the tokens of one step are shared out."""

from typing import Protocol


class Shares(Protocol):
    """The token budget of one step while it is being shared out."""

    left: int
    """Tokens a prompt may still take."""

    def grant(self, wanted: int) -> int:
        """Tokens a running sequence that could use so many may compute; 0 is none."""

    def grant_new(self, wanted: int) -> int:
        """Tokens a sequence that starts now, and could use so many, may compute."""

    def give_back(self, granted: int) -> None:
        """Whoever was granted so many sits this step out: others may have them."""


class Batching(Protocol):
    """Opens the budget of a step."""

    def open(self, wanted: list[int]) -> Shares:
        """The budget of a step in which sequences go on that could use so many tokens each."""


class Mixed:
    """Decodes first, one token each; prompts are cut into chunks that fill the rest.

    Somebody starts only when tokens are left after all who run took what they can use; so there are
    never more running sequences than tokens in a step, and each has one whenever it can use it.
    Source: Agrawal et al. 2024 (Sarathi-Serve), chunked prefill without stalls.
    """

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget

    def open(self, wanted: list[int]) -> "MixedShares":
        """A budget in which one token is kept for every sequence that decodes."""
        return MixedShares(self.token_budget - wanted.count(1))


class MixedShares:
    """What is left for prompts; the decodes' tokens were set aside before."""

    def __init__(self, left: int) -> None:
        self.left = left

    def grant(self, wanted: int) -> int:
        """1 for a decode; for a prompt under way as much of the rest as it can use."""
        return 1 if wanted == 1 else self.grant_new(wanted)

    def grant_new(self, wanted: int) -> int:
        """As much of the rest as can be used; it was not there when the step opened."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted

    def give_back(self, granted: int) -> None:
        """A decode's token, though set aside, is one more for prompts."""
        self.left += granted
