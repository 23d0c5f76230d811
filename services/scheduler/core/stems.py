"""Stems: from which other beam a beam that comes back may take its first blocks.

When the beams of a request compute everything again, no block need be computed twice. Each takes
the full blocks of what it has in common with its *stem*: of the beams before it, the one that
begins with most of its tokens. The first beam has none, and computes all of its tokens.
"""

from bisect import bisect

from services.scheduler.core.sequence import Sequence


def find_stems(beams: tuple[Sequence, ...]) -> None:
    """Set `stem` and `num_common` of every beam but the first.

    Among sorted texts the one that has most in common with another stands next to it.
    """
    texts = [beams[0].generated]
    owners = [beams[0]]
    for beam in beams[1:]:
        at = bisect(texts, beam.generated)
        neighbours = [near for near in (at - 1, at) if 0 <= near < len(texts)]
        best = max(neighbours, key=lambda near: _num_common(texts[near], beam.generated))
        beam.stem = owners[best]
        beam.num_common = len(beam.prompt) + _num_common(texts[best], beam.generated)
        texts.insert(at, beam.generated)
        owners.insert(at, beam)


def _num_common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
