"""Pinned prefixes: which there are, and with which of them a request begins.

A prefix is computed and held by a request of its own, that draws nothing: its place comes before
all others, it gives way to nobody, and once it is computed it rests, PINNED. Who begins with all of
it starts on all of its blocks, the last one too if that is partly filled; else on the full ones
that it has in common with it. At least one token is always left to compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.scheduler.core.decoding import Nothing
from services.scheduler.core.events import Gateway
from services.scheduler.core.kv.prefix import root_hash
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.geometry import blocks_in
from shared.ids import BlockId, Ids, RequestId, SequenceId
from shared.messages import Pin, Pinned, Submit
from shared.sampling import NO_DRAW, SamplingParams

_FIRST_ARRIVAL: Final = float("-inf")
_FIRST_PRIORITY: Final = -(2**31) - 1  # below all that a request may ask for
_NOTHING: Final = SamplingParams(NO_DRAW, max_tokens=0)


class Prefix:
    """One pinned prefix: what was asked for, who asked, and the request that holds it."""

    def __init__(self, pin: Pin, gateway: Gateway, sequence_id: SequenceId) -> None:
        self.pin = pin
        self.gateway = gateway
        self.num_hits = 0
        """Requests whose first start found tokens of it."""
        self.root = root_hash(pin.key_hash, pin.cache_salt)
        self.request = Request(
            Submit(
                pin.pin_id,
                pin.token_ids,
                _NOTHING,
                priority=_FIRST_PRIORITY,
                cache_salt=pin.cache_salt,
                key_hash=pin.key_hash,
            ),
            gateway=gateway,
            arrival=_FIRST_ARRIVAL,
            max_tokens=0,
            decoding=Nothing(),
            sequences=(Sequence(sequence_id, 0, pin.token_ids),),
            is_pin=True,
        )

    @property
    def is_ready(self) -> bool:
        """Whether all its tokens are computed."""
        return self.request.status is Status.PINNED

    def told(self, block_size: int) -> Pinned:
        """What a gateway hears of it; a `block_size` of 0 is not known yet."""
        num_tokens = len(self.pin.token_ids)
        return Pinned(
            self.pin.pin_id,
            num_tokens,
            blocks_in(num_tokens, block_size) if block_size else 0,
            self.is_ready,
            self.num_hits,
            self.pin.context,
        )


class Match(NamedTuple):
    """The first `num_tokens` tokens of a request are those of this prefix."""

    prefix: Prefix
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request can start: on these blocks, which hold its first `num_tokens` tokens.

    The last one may be shared in part; whoever writes to it copies it first.
    """

    blocks: list[BlockId]
    num_tokens: int
    prefix: Prefix | None = None

    def num_new_blocks(self, to_come: int, block_size: int) -> int:
        """Blocks that its start takes, if it is to get `to_come` more than it has."""
        is_copied = self.num_tokens % block_size > 0
        return to_come - len(self.blocks) + is_copied


class Pins:
    """All pinned prefixes, oldest first."""

    def __init__(self) -> None:
        self._prefixes: dict[RequestId, Prefix] = {}
        self._by_root: dict[bytes, dict[RequestId, Prefix]] = {}
        self._seen: tuple[Sequence, int, Match | None] | None = None
        """Who was matched last, with how many tokens, and with what."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def get(self, pin_id: RequestId) -> Prefix | None:
        """The prefix of that id."""
        return self._prefixes.get(pin_id)

    def add(self, prefix: Prefix) -> None:
        """A new one. Raises: InvariantBroken if its id is known."""
        pin_id = prefix.pin.pin_id
        if pin_id in self._prefixes:
            raise InvariantBroken(f"the prefix {pin_id} is pinned already")
        self._prefixes[pin_id] = prefix
        self._by_root.setdefault(prefix.root, {})[pin_id] = prefix
        self._seen = None

    def remove(self, prefix: Prefix) -> None:
        """It is pinned no more."""
        pin_id = prefix.pin.pin_id
        del self._prefixes[pin_id], self._by_root[prefix.root][pin_id]
        if not self._by_root[prefix.root]:
            del self._by_root[prefix.root]
        self._seen = None

    def match(self, lead: Sequence, root: bytes, block_size: int) -> Match | None:
        """The prefix that has most of this sequence's first tokens; of equal ones the oldest.

        Asked again of the one who waits first, it looks again only if prefixes came or went.
        """
        if root not in self._by_root:
            return None
        seen, wanted = self._seen, lead.num_wanted
        if seen is not None and seen[0] is lead and seen[1] == wanted:
            return seen[2]
        match = self._look(lead, root, block_size)
        self._seen = lead, wanted, match
        return match

    def restart(self) -> None:
        """Another executor, perhaps with blocks of another size."""
        self._seen = None

    def _look(self, lead: Sequence, root: bytes, block_size: int) -> Match | None:
        tokens = lead.token_ids(0, lead.num_wanted)
        best = None
        for prefix in self._by_root[root].values():
            if prefix.request.sequences[0] is lead:
                continue
            num_tokens = _num_shared(prefix.pin.token_ids, tokens, block_size)
            if num_tokens > (best.num_tokens if best is not None else 0):
                best = Match(prefix, num_tokens)
        return best


def _num_shared(prefix: Ids, tokens: Ids, block_size: int) -> int:
    """Tokens that one who has these can take over; the last one is always left to compute.

    >>> _num_shared((1, 2, 3), (1, 2, 3, 4), 2), _num_shared((1, 2, 3), (1, 2, 3), 2)
    (3, 2)
    >>> _num_shared((1, 2, 3, 4), (1, 2, 3, 5, 6), 2)
    2
    """
    most = len(tokens) - 1
    if tokens[: len(prefix)] == prefix:
        return min(len(prefix), most)
    low, high = 0, min(len(prefix), most)
    while low < high:  # they are equal before `low`, and not before `high` + 1
        middle = (low + high + 1) // 2
        if prefix[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // block_size * block_size
