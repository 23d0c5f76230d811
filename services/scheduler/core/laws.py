"""The laws, as far as they show from inside. Whoever breaks one learns which, where and how.

The numbers are those of docs/protocol.md. Laws 1, 3 (of the other side), 7 and 9 show only in what
is sent; the tests watch the commands for them.
"""

from collections import Counter

from services.scheduler.core.beam_laws import check_beams
from services.scheduler.core.flight_laws import check_flight
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.law import demand
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.pin_laws import check_pins
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.geometry import blocks_in
from shared.ids import BlockId


def check_laws(scheduler: Scheduler) -> None:
    """Check every law that shows from inside. Raises: InvariantBroken with the story."""
    holdings = scheduler.steps.holdings
    if holdings is not None:
        _check_pool("gpu", holdings.allocator)
        _check_pool("cpu", holdings.cpu)
        _check_owners(scheduler, holdings)
        _check_usage(scheduler, holdings)
        _check_prefix(scheduler, holdings)
        _check_kept(scheduler, holdings)
    _check_lines(scheduler)
    _check_queue(scheduler)
    for request in scheduler.book.everyone:
        _check_request(request)
        if request.submit.sampling.use_beam_search:
            check_beams(request)
    check_pins(scheduler)
    check_flight(scheduler)
    _check_counters(scheduler)


def _check_pool(name: str, allocator: Allocator) -> None:
    pool = allocator.pool
    counted = Counter(block_id for table in allocator.tables for block_id in table.block_ids)
    idle = Counter((*pool.free_blocks, *pool.cached_blocks, *pool.settling_blocks))
    for block_id in map(BlockId, range(pool.num_blocks)):
        pointers, times = counted[block_id], idle[block_id]
        where = f"{name} block {block_id}"
        story = f"{where} is in {pointers} tables and {times} times free, cached or settling"
        demand(times == (0 if pointers else 1), "law 4, free + cached + held = all", story)
        story = f"{where} counts {pool.ref_count(block_id)}, {pointers} tables have it"
        demand(pool.ref_count(block_id) == pointers, "law 4, reference counts", story)
    for table in allocator.tables:
        story = f"{name} table {table.entries()} with {table.num_filled} places filled"
        full = len(table) == blocks_in(table.num_filled, table.block_size)
        demand(full, "law 6, only the last block is partly filled", story)
        demand(len(set(table.block_ids)) == len(table), "law 4, a block once a table", story)
        demand(list(table.row) == table.block_ids, "law 6, a row's table is the table", story)


def _check_owners(scheduler: Scheduler, holdings: Holdings) -> None:
    """Every table belongs to one sequence that lives."""
    sequences = [s for request in scheduler.book.everyone for s in request.every_sequence]
    for name, owned, known in (
        ("gpu", [s.table for s in sequences if s.table is not None], holdings.allocator.tables),
        ("cpu", [s.swapped for s in sequences if s.swapped is not None], holdings.cpu.tables),
    ):
        tables, handed_out = Counter(map(id, owned)), Counter(map(id, known))
        story = f"{name}: {len(owned)} of sequences, {handed_out.total()} handed out"
        demand(tables == handed_out, "law 4, every table has one owner", story)


def _check_usage(scheduler: Scheduler, holdings: Holdings) -> None:
    for name, usage, allocator in (
        ("gpu", scheduler.usage(), holdings.allocator),
        ("cpu", scheduler.cpu_usage(), holdings.cpu),
    ):
        held = {block_id for table in allocator.tables for block_id in table.block_ids}
        held.update(allocator.pool.settling_blocks)
        story = f"{name}: {usage}, {len(held)} blocks held"
        demand(usage.num_used == len(held), "law 8, gauges", story)
        places = usage.tokens + usage.reserved + usage.internal + usage.external
        story = f"{name}: {usage} has {places} places in {len(held)} blocks"
        demand(places == len(held) * allocator.block_size, "law 8, gauges", story)
    if not scheduler.steps.in_flight:
        settling = (
            *holdings.allocator.pool.settling_blocks,
            *holdings.cpu.pool.settling_blocks,
        )
        demand(not settling, "law 2, held for a plan", f"{settling} are held, no plan is sent")


def _check_prefix(scheduler: Scheduler, holdings: Holdings) -> None:
    """Cached means known; what is expected is what running tables have yet to make known."""
    prefix, pool = holdings.prefix, holdings.allocator.pool
    if prefix is None:
        demand(not pool.cached_blocks, "no cache", f"{pool.cached_blocks} are cached")
        return
    known = set(prefix.blocks.values())
    demand(len(known) == len(prefix.blocks), "cache, a block for each content", str(known))
    stray = sorted(set(pool.cached_blocks) - known)
    demand(not stray, "cache, cached blocks are known", f"blocks {stray}")
    free = sorted(known.intersection(pool.free_blocks))
    demand(not free, "cache, known blocks are not free", f"blocks {free}")
    expected: Counter[bytes] = Counter()
    for request in scheduler.book.everyone:
        for sequence in request.every_sequence:
            table = sequence.table
            if table is not None:
                expected.update(sequence.hashes[table.num_known : table.num_expected])
    story = f"{prefix.expected.total()} expected, {expected.total()} to come"
    demand(prefix.expected == expected, "cache, what is coming", story)


def _check_kept(scheduler: Scheduler, holdings: Holdings) -> None:
    """Blocks for the known tokens of those who came back are there, or come free by themselves."""
    need = 0
    for request in scheduler.book.running:
        if request.is_protected:
            for sequence in request.live_sequences:
                if sequence.table is not None:
                    wanted = min(sequence.num_tokens, sequence.goal)
                    need += max(0, blocks_in(wanted, holdings.cpu.block_size) - len(sequence.table))
    pool = holdings.allocator.pool
    story = f"{need} are promised, {pool.num_available} free, {pool.num_settling} settling"
    demand(need <= pool.num_available + pool.num_settling, "blocks are kept", story)


def _check_lines(scheduler: Scheduler) -> None:
    book = scheduler.book
    for status in (Status.WAITING, Status.RUNNING, Status.SWAPPED, Status.PINNED):
        in_line = list(book.line(status))
        by_status = [r for r in book.everyone if r.status is status]
        names = sorted(request.request_id for request in by_status)
        story = f"{[r.request_id for r in in_line]} stand in the line, {names} say so"
        demand(set(in_line) == set(by_status), f"lines, {status}", story)
        demand(len(in_line) == len(by_status), f"lines, {status}, each once", story)
        places = [book.order.place(request) for request in in_line]
        demand(places == sorted(places), f"lines, {status}, in their order", str(places))
    most = scheduler.config.most_sequences
    sequences = sum(request.num_seats for request in book.running)
    demand(
        sequences <= most,
        "max_num_seqs, and a token for each",
        f"{sequences} sequences run, at most {most}",
    )


def _check_queue(scheduler: Scheduler) -> None:
    """The queue's running count, by which arrivals are measured, is what a count now says."""
    queued = [request for request in scheduler.book if request.is_queued]
    prompts = sum(len(request.submit.prompt) for request in queued)
    counted = (scheduler.book.num_queued, scheduler.book.num_queued_tokens)
    story = f"{counted} counted, {len(queued)} requests with {prompts} prompt tokens are queued"
    demand(counted == (len(queued), prompts), "the queue's count", story)
    others = [r.request_id for r in queued if r.status is not Status.WAITING]
    demand(not others, "the queue's count", f"{others} are queued and do not wait")


def _check_request(request: Request) -> None:
    who = f"{request.request_id} ({request.status})"
    is_over = request.status is Status.FINISHED
    story = f"{who} has {len(request.live_sequences)} live sequences"
    demand(bool(request.live_sequences) != is_over, "finished means every sequence ended", story)
    story = f"{who}: detached {request.is_detached}, context of {len(request.submit.context)} bytes"
    may_be = request.gateway is not None and not request.is_detached
    demand(
        may_be or request.is_pin or (request.is_detached and bool(request.submit.context)),
        "a request has a reader, or can get one",
        story,
    )
    for sequence in request.every_sequence:
        _check_progress(who, request, sequence)
    _check_tables(who, request)
    _check_scores(who, request)


def _check_tables(who: str, request: Request) -> None:
    """Running ones hold gpu blocks, swapped ones cpu blocks, others none; the lead comes first.

    Of beams that come back it is the stem that comes first.
    """
    alive = request.live_sequences
    for name, statuses, tables in (
        ("gpu", (Status.RUNNING, Status.PINNED), [s.table for s in request.every_sequence]),
        ("cpu", (Status.SWAPPED,), [s.swapped for s in request.every_sequence]),
    ):
        holders = {
            sequence
            for table, sequence in zip(tables, request.every_sequence, strict=True)
            if table is not None
        }
        live = [sequence in holders for sequence in alive]
        story = f"{who} has {live} {name} tables of its live sequences"
        if request.status in statuses:
            is_shared = all(live) or (live[0] and not any(live[1:]))
            if request.beams:
                stems = {beam.stem for beam in request.beams[1:] if beam in holders}
                is_shared = all(live) or (live[0] and stems <= holders)
            demand(is_shared, "law 5, running ones hold blocks, all or the lead", story)
        else:
            demand(not any(live), "law 5, blocks in one pool, all or none", story)
        others = [one.index for one in request.sequences if one in holders and one not in alive]
        story = f"{who}: {others} hold {name} blocks"
        demand(not others, "law 5, an end gives blocks back", story)


def _check_progress(who: str, request: Request, sequence: Sequence) -> None:
    story = f"{who} computed {sequence.num_computed} of {sequence.num_wanted} tokens"
    demand(sequence.num_computed <= sequence.num_wanted, "progress", story)
    demand(0 <= sequence.ahead <= 2, "draws in flight", f"{who}: {sequence.ahead} ahead")
    if sequence.finish is None and not request.is_pin:
        story = f"{who} goes on with {len(sequence.generated)} of {request.max_tokens} tokens"
        wants_scores = not sequence.generated and request.num_unscored > 0
        wants_more = len(sequence.generated) < request.max_tokens or wants_scores
        demand(wants_more, "max_tokens ends it", story)


def _check_scores(who: str, request: Request) -> None:
    """Log-probabilities are as many as was asked for, of the answer and of the prompt."""
    sampling, num_scores = request.submit.sampling, len(request.prompt_logprobs)
    for sequence in request.every_sequence:
        wanted = len(sequence.generated) if sampling.logprobs is not None else 0
        story = f"{who} has {len(sequence.logprobs)} logprobs of {len(sequence.generated)} tokens"
        demand(len(sequence.logprobs) == wanted, "a logprob for each token", story)
    wanted = len(request.submit.prompt) - 1 if sampling.prompt_logprobs is not None else 0
    story = f"{who} has {num_scores} scores and lacks {request.num_unscored} of {wanted}"
    demand(num_scores + request.num_unscored == wanted, "a score for each prompt token", story)
    begun = any(sequence.generated for sequence in request.every_sequence)
    if begun and not request.submit.generated:
        demand(not request.num_unscored, "a prompt is scored before its answer", story)


def _check_counters(scheduler: Scheduler) -> None:
    counters, in_flight = scheduler.counters, len(scheduler.steps.in_flight)
    over = counters.plans_finished + counters.plans_refused + counters.plans_lost
    story = f"{counters.plans_sent} sent, {over} over, {in_flight} in flight"
    demand(counters.plans_sent == over + in_flight, "law 3, one result a plan", story)
    live = sum(request.is_live for request in scheduler.book)
    over = counters.requests_finished.total()
    story = f"{counters.requests_accepted} accepted, {over} finished, {live} live"
    demand(counters.requests_accepted == over + live, "every request ends once", story)
