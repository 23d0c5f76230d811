"""Every kernel against float64, or against what is exact by nature."""

from ops.gpu import correct_attention, correct_blocks, correct_draws, correct_model
from ops.gpu.section import Section


def run(section: Section) -> None:
    """All of them; each kind tells how many cases it had, and its largest error."""
    for what, check in (
        ("draws", correct_draws.draws),
        ("writes", correct_blocks.writes),
        ("copies and swaps", correct_blocks.copies),
        ("a decoder's loop", correct_model.loop),
        ("attention", correct_attention.by_feature),
        ("the same bits in any company", correct_attention.invariance),
        ("places beyond 2**31", correct_attention.offsets),
    ):
        if section.has_time(what):
            with section.guarded(what):
                check(section, what)
