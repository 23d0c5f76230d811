"""A plan in the making."""

from dataclasses import dataclass, field

from services.scheduler.core.flight import SentPlan, SentRow
from services.scheduler.core.policies.batching import Shares
from services.scheduler.core.request import Request
from shared import messages
from shared.ids import Boot, SequenceId
from shared.messages import Move, Row, StepPlan


@dataclass(slots=True)
class Draft:
    """What one walk gives.

    Attributes:
        scores_left: prompt tokens that may still be scored, shared out like the token budget:
            first come, first served. It is full in every step, so the first is never without.
        num_running: sequences that run.
        reserved: blocks kept from growth for known tokens of those who came back.
        owed: settling blocks that are spoken for by those who sit this step out.
    """

    step_id: int
    shares: Shares
    scores_left: int
    num_running: int
    reserved: int
    decodes: list[Row] = field(default_factory=list)
    prompts: list[Row] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)
    swap_out: list[Move] = field(default_factory=list)
    swap_in: list[Move] = field(default_factory=list)
    swapped_out: list[Request] = field(default_factory=list)
    swapped_in: list[Request] = field(default_factory=list)
    sent: dict[SequenceId, SentRow] = field(default_factory=dict)
    owed: int = 0
    num_again: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        return not (self.sent or self.swap_out or self.swap_in)

    def seal(self, boot: Boot, gave_way: list[messages.Preemption]) -> SentPlan:
        """The plan as it is sent: from now on the tokens it draws have places."""
        for row in self.sent.values():
            for sequence in row.draws:
                sequence.ahead += 1
        num_prompt_tokens = sum([len(row.token_ids) for row in self.prompts])
        plan = StepPlan(
            boot,
            self.step_id,
            rows=(*self.decodes, *self.prompts),
            preemptions=tuple(gave_way),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
        )
        return SentPlan(
            plan,
            self.sent,
            self.swapped_out,
            self.swapped_in,
            num_tokens=len(self.decodes) + num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
            num_again=self.num_again,
        )
