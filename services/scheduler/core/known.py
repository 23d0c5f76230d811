"""What is known of the tokens in the pool: which are cached or pinned, and which are on their way.

Of a sequence's full blocks the hashes are known to the prefix cache once they are computed; until
then they are *expected* of whoever computes them, and others may wait for that.
"""

from collections.abc import Iterable

from services.scheduler.core.flight import SentRow
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.prefix import PrefixCache, root_hash
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.pins import Found, Pins
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.geometry import blocks_in
from shared.ids import BlockId


class Known:
    """The prefix cache, if there is one, and the pins, for whoever is about to compute."""

    def __init__(
        self, pool: BlockPool, block_size: int, prefix: PrefixCache | None, pins: Pins
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix = prefix
        self._pins = pins

    def prepare(self, request: Request) -> None:
        """Hash what the lead begins with: when it arrives, not while a step waits for its start."""
        if self._prefix is not None:
            lead = request.live_sequences[0]
            num_full = lead.num_tokens // self._block_size
            self._prefix.hashes(lead, self._root(request), num_full)

    def hits(self, request: Request, before: Iterable[Request] | None = None) -> Found | None:
        """What of the first tokens is here, cached or pinned; None: more is being computed.

        It waits for what those `before` it compute; for anybody if that is None. At least one token
        is left to compute: something has to be drawn from.
        """
        if not request.takes_hits:
            return Found([], 0)
        lead, found = request.live_sequences[0], list[BlockId]()
        if self._prefix is not None:
            most = (lead.num_wanted - 1) // self._block_size
            hashes = self._prefix.hashes(lead, self._root(request), most)[:most]
            found = self._prefix.find(hashes)
            if len(found) < most and self._is_coming(hashes[len(found)], len(found), before):
                return None
        num_tokens = len(found) * self._block_size
        match = self._pins.match(lead, self._root(request), self._block_size)
        if match is None:
            return Found(found, num_tokens)
        pin = match.prefix.request
        if match.num_tokens > num_tokens and pin.status is Status.RUNNING:
            return None
        table = pin.sequences[0].table
        if pin.status is not Status.PINNED or table is None:
            return Found(found, num_tokens)
        if match.num_tokens > num_tokens:
            num_tokens = match.num_tokens
            found = table.block_ids[: blocks_in(num_tokens, self._block_size)]
        return Found(found, num_tokens, match.prefix)

    def _is_coming(self, content: bytes, at: int, before: Iterable[Request] | None) -> bool:
        if self._prefix is None or not self._prefix.is_coming(content):
            return False
        return before is None or any(_computes(request, content, at) for request in before)

    def of_sequence(self, request: Request, sequence: Sequence) -> list[BlockId]:
        """The blocks of its first tokens that are cached; one token is left to compute."""
        if self._prefix is None or not request.takes_hits:
            return []
        most = (sequence.num_wanted - 1) // self._block_size
        return self._prefix.find(self._prefix.hashes(sequence, self._root(request), most)[:most])

    def landed(self, row: SentRow) -> None:
        """A row's plan has returned: its full blocks go into the prefix cache.

        A block whose content is there already is given up for the one that is: two requests that
        computed the same end up on one block, from the next plan on.
        """
        table, sequence, prefix = row.table, row.sequence, self._prefix
        num_full = row.last // self._block_size
        if prefix is None or table.num_known >= num_full or sequence.table is not table:
            return
        hashes = prefix.hashes(sequence, self._root(row.request), num_full)
        for at in range(table.num_known, num_full):
            content, own = hashes[at], table.block_ids[at]
            if at < table.num_expected:
                prefix.unexpect(content)
            known = prefix.get(content)
            if known is None:
                prefix.add(content, own)
            elif known != own:
                self._point_all(row.request, table, at, known)
        table.num_known = num_full
        table.num_expected = max(table.num_expected, num_full)

    def _point_all(self, request: Request, table: BlockTable, at: int, known: BlockId) -> None:
        """Point this table to the block that is known, and those that share its own with it."""
        own, pool = table.block_ids[at], self._pool
        tables = [table]
        if len(request.sequences) > 1:
            tables = [one.table for one in request.live_sequences if one.table is not None]
        for one in tables:
            if at < len(one) and one.block_ids[at] == own:
                pool.share(known)
                one.point(at, known)
                pool.release(own, one.last_step)

    def _root(self, request: Request) -> bytes:
        if not request.root:
            request.root = root_hash(request.submit.key_hash, request.submit.cache_salt)
        return request.root

    def expect(self, request: Request, sequence: Sequence) -> None:
        """A table was begun: others may wait for the blocks that it is to fill."""
        table, prefix = sequence.table, self._prefix
        if prefix is None or table is None:
            return
        num_full = sequence.num_tokens // self._block_size
        hashes = prefix.hashes(sequence, self._root(request), num_full)
        for at in range(table.num_known, num_full):
            prefix.expect(hashes[at])
        table.num_expected = max(table.num_known, num_full)

    def unexpect(self, sequence: Sequence, table: BlockTable) -> None:
        """A table is given up: nobody need wait for it."""
        if self._prefix is not None:
            for at in range(table.num_known, table.num_expected):
                self._prefix.unexpect(sequence.hashes[at])


def _computes(request: Request, content: bytes, at: int) -> bool:
    """Whether this is what a request that runs has yet to make known as its block number `at`."""
    return any(
        one.table is not None
        and one.table.num_known <= at < one.table.num_expected
        and one.hashes[at] == content
        for one in request.live_sequences
    )
