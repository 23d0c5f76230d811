"""Who holds which blocks, in both pools: the one place where a sequence's tables come and go.

Of a request with several sequences the first live one, the *lead*, computes the prompt alone. Once
the prompt is placed the others share its blocks: all of them if all are at the same token, else the
full ones, and compute the rest themselves. Beams that come back share more: stems.py.
"""

from collections import Counter
from itertools import chain

from services.scheduler.core.known import Known
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.kv.prefix import PrefixCache
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.pins import Found, Pins
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.stems import find_stems
from shared.geometry import blocks_in
from shared.ids import BlockId
from shared.messages import Move


class Holdings:
    """The blocks of one executor life."""

    def __init__(
        self,
        allocator: Allocator,
        num_cpu_blocks: int = 0,
        prefix: PrefixCache | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.allocator = allocator
        self.cpu = PagedAllocator(BlockPool(num_cpu_blocks), allocator.block_size)
        self.prefix = prefix
        self._block_size = allocator.block_size
        self.known = Known(
            allocator.pool, allocator.block_size, prefix, pins if pins is not None else Pins()
        )

    def settle(self, before_step: int | None) -> None:
        """Blocks given up may be handed out again, unless a plan from that step on names them."""
        self.allocator.pool.settle(before_step)
        self.cpu.pool.settle(before_step)

    # ----------------------------------------------------------------- what is needed

    def to_come(self, request: Request) -> int:
        """Blocks that the known tokens of a request need and that it does not have yet."""
        live, need = request.live_sequences, 0
        for sequence in live:
            if sequence.table is not None:
                need += self._beyond(sequence, len(sequence.table))
            elif sequence is live[0]:
                need += self._beyond(sequence, 0)
            elif not is_joint(live):
                need += self._beyond(sequence, self._num_common(request, sequence))
        return need

    def to_return(self, request: Request) -> int:
        """Blocks that a swapped request needs to be as it was and to place what it knows."""
        live, need = request.live_sequences, 0
        tables = [sequence.swapped for sequence in live if sequence.swapped is not None]
        need = len({block_id for table in tables for block_id in table.block_ids})
        writers: Counter[BlockId] = Counter()
        for sequence in live:
            if sequence.swapped is not None:
                need += self._beyond(sequence, len(sequence.swapped))
                if sequence.swapped.num_empty and sequence.num_wanted > sequence.swapped.num_filled:
                    writers[sequence.swapped.block_ids[-1]] += 1
            elif not is_joint(live):
                need += self._beyond(sequence, self._num_common(request, sequence))
        return need + _copies(writers, self.cpu.pool)

    def to_grow(self, asked: list[tuple[BlockTable | None, int]]) -> int:
        """Blocks that the tables of one request take for so many more places each."""
        writers: Counter[BlockId] = Counter()
        need = 0
        for table, num_places in asked:
            if table is None:
                continue
            need += blocks_in(table.num_filled + num_places, self._block_size) - len(table)
            if table.num_empty and num_places:
                writers[table.block_ids[-1]] += 1
        return need + _copies(writers, self.allocator.pool)

    def _beyond(self, sequence: Sequence, num_blocks: int) -> int:
        return max(0, blocks_in(sequence.num_wanted, self._block_size) - num_blocks)

    def _num_common(self, request: Request, sequence: Sequence) -> int:
        """Full blocks that this sequence can share with its lead or stem, a token left to compute.

        Beams change all together, and forget their stems then: they are found when missed.
        """
        num_common = len(sequence.prompt)
        if request.beams:
            if sequence.stem is None:
                find_stems(request.beams)
            num_common = sequence.num_common
        return min(num_common, sequence.num_tokens - 1) // self._block_size

    def price(self, request: Request) -> tuple[int, int]:
        """(blocks to move, tokens to compute again) if this request gives way.

        A block that others hold too, and that the prefix cache knows, will still be there: its
        tokens are not counted. Of all others it is assumed that they are gone by then, as blocks
        are short.
        """
        own: Counter[BlockId] = Counter()
        filled: dict[BlockId, int] = {}
        for sequence in request.live_sequences:
            if sequence.table is not None:
                own.update(sequence.table.block_ids)
                filled.update(sequence.table.entries())
        pool, prefix = self.allocator.pool, self.prefix
        num_tokens = sum(
            count
            for block_id, count in filled.items()
            if prefix is None
            or not prefix.is_known(block_id)
            or pool.ref_count(block_id) == own[block_id]
        )
        return len(filled), num_tokens

    # ----------------------------------------------------------------- starting

    def start(self, request: Request, found: Found) -> Sequence:
        """Give the lead its table, over the blocks that were found. Returns: the lead."""
        lead = request.live_sequences[0]
        lead.table = self.allocator.start(found.blocks, found.num_tokens)
        self.known.expect(request, lead)
        return lead

    def share_prompt(self, request: Request) -> None:
        """Give the others their tables, if the lead has placed enough of the prompt."""
        live = request.live_sequences
        if request.beams:
            self._share_stems(request, live)
            return
        lead, others = live[0], live[1:]
        if not others or lead.table is None or others[0].table is not None:
            return
        if is_joint(live):
            if lead.table.num_filled == len(lead.prompt):
                for sequence in others:
                    sequence.table = self._fork(lead, lead.table, sequence, None)
            return
        common = len(lead.prompt) // self._block_size
        if lead.table.num_filled < common * self._block_size or request.num_unscored:
            return
        for sequence in others:
            self._share(request, lead, lead.table, sequence)

    def _share_stems(self, request: Request, beams: tuple[Sequence, ...]) -> None:
        """Give beams their tables whose stems have placed enough of what they have in common."""
        for beam in beams:
            if beam.table is None:
                num_common, stem = self._num_common(request, beam), beam.stem
                if stem is None or stem.table is None:
                    continue
                if stem.table.num_filled >= num_common * self._block_size:
                    self._share(request, stem, stem.table, beam)

    def _share(
        self, request: Request, lead: Sequence, table: BlockTable, sequence: Sequence
    ) -> None:
        """A table over what the lead has, or over what the prefix cache has if that is more."""
        num_common = self._num_common(request, sequence)
        hits = self.known.of_sequence(request, sequence)
        if len(hits) > num_common:
            sequence.table = self.allocator.start(hits)
        else:
            sequence.table = self._fork(lead, table, sequence, num_common)

    def branch(self, beam: Sequence, twin: Sequence) -> None:
        """A twin of this beam, in whichever pool it is: whoever writes first copies."""
        twin.hashes = list(beam.hashes)
        if beam.table is not None:
            twin.table = self.allocator.fork(beam.table)
            twin.table.num_expected = twin.table.num_known
        if beam.swapped is not None:
            twin.swapped = self.cpu.fork(beam.swapped)

    def _fork(
        self, lead: Sequence, table: BlockTable, sequence: Sequence, num_blocks: int | None
    ) -> BlockTable:
        if not sequence.hashes:
            num_hashed = len(lead.prompt) // self._block_size if num_blocks is None else num_blocks
            sequence.hashes = lead.hashes[:num_hashed]
        twin = self.allocator.fork(table, num_blocks)
        twin.num_expected = twin.num_known
        return twin

    # ----------------------------------------------------------------- ending, giving way

    def release(self, sequence: Sequence) -> None:
        """The sequence needs its blocks no more: they are free now, or at its plan's result.

        A beam's report goes with them: it is asked for again when they are computed again.
        """
        sequence.report = None
        if sequence.table is not None:
            self.known.unexpect(sequence, sequence.table)
            self.allocator.free(sequence.table)
            sequence.table = None
        if sequence.swapped is not None:
            self.cpu.free(sequence.swapped)
            sequence.swapped = None

    def swap_out(self, request: Request, step_id: int) -> list[Move] | None:
        """Move all blocks of a request to the CPU pool, each once; None if there is no room."""
        pool = self.cpu.pool
        sequences = [sequence for sequence in request.live_sequences if sequence.table is not None]
        gpu_blocks = chain.from_iterable(s.table.block_ids for s in sequences if s.table)
        distinct = dict.fromkeys(gpu_blocks)
        if len(distinct) > pool.num_available:
            return None
        moves: dict[BlockId, BlockId] = {}
        for sequence in sequences:
            if sequence.table is not None:
                sequence.table.last_step = step_id
                sequence.swapped = _twin(self.cpu, sequence.table, moves, step_id)
                self.known.unexpect(sequence, sequence.table)
                self.allocator.free(sequence.table)
                sequence.table = None
        return [Move(source, destination) for source, destination in moves.items()]

    def swap_in(self, request: Request, step_id: int) -> list[Move]:
        """Move all blocks of a request back; there must be room."""
        moves: dict[BlockId, BlockId] = {}
        for sequence in request.live_sequences:
            if sequence.swapped is not None:
                sequence.swapped.last_step = step_id
                sequence.table = _twin(self.allocator, sequence.swapped, moves, step_id)
                self.known.expect(request, sequence)
                self.cpu.free(sequence.swapped)
                sequence.swapped = None
        return [Move(source, destination) for source, destination in moves.items()]


def is_joint(live: tuple[Sequence, ...]) -> bool:
    """Whether all these sequences are still at the end of their prompt, and grow from one row."""
    return not any(sequence.generated or sequence.ahead for sequence in live)


def _copies(writers: Counter[BlockId], pool: BlockPool) -> int:
    """Copies that are made if so many write to each of these blocks; the last owner makes none."""
    return sum(count - (count == pool.ref_count(block_id)) for block_id, count in writers.items())


def _twin(
    allocator: Allocator, table: BlockTable, moves: dict[BlockId, BlockId], step_id: int
) -> BlockTable:
    """A table like one of the other pool; `moves` says where each block of that pool goes."""
    twin = allocator.start()
    for block_id in table.block_ids:
        if block_id in moves:
            allocator.pool.share(moves[block_id])
        else:
            moves[block_id] = allocator.pool.take()
        twin.block_ids.append(moves[block_id])
    twin.num_filled = table.num_filled
    twin.last_step = step_id
    return twin
