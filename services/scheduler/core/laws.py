"""The laws, as far as they show from inside. Whoever breaks one learns which, where and how.

The numbers are those of docs/protocol.md. Laws 1, 3 (of the other side), 7 and 9 show only in what
is sent; the tests watch the commands for them.
"""

from collections import Counter

from services.scheduler.core.flight import SentPlan
from services.scheduler.core.kv.allocator import Allocator
from services.scheduler.core.kv.table import BlockTable
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.planner import SUSPECT_AFTER_LOSSES
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Sequence
from shared.errors import InvariantBroken
from shared.geometry import blocks_in
from shared.ids import BlockId


def check_laws(scheduler: Scheduler) -> None:
    """Check every law that shows from inside. Raises: InvariantBroken with the story."""
    allocator = scheduler.steps.allocator
    if allocator is not None:
        _check_pool(allocator)
        _check_owners(scheduler, allocator)
        _check_usage(scheduler, allocator)
    _check_lines(scheduler)
    _check_queue(scheduler)
    for request in scheduler.book:
        _check_request(request)
    _check_flight(scheduler)
    _check_counters(scheduler)


def _demand(holds: bool, law: str, story: str) -> None:
    if not holds:
        raise InvariantBroken(f"{law}: {story}")


def _check_pool(allocator: Allocator) -> None:
    pool = allocator.pool
    counted = Counter(block_id for table in allocator.tables for block_id in table.block_ids)
    free = Counter(pool.free_blocks)
    for block_id in map(BlockId, range(pool.num_blocks)):
        pointers, copies_free = counted[block_id], free[block_id]
        story = f"block {block_id} is in {pointers} tables and {copies_free} times in the free list"
        _demand(copies_free == (0 if pointers else 1), "law 4, free + held = all", story)
        story = f"block {block_id} counts {pool.ref_count(block_id)}, {pointers} tables have it"
        _demand(pool.ref_count(block_id) == pointers, "law 4, reference counts", story)
    for table in allocator.tables:
        story = f"table {table.entries()} with {table.num_filled} places filled"
        full = len(table) == blocks_in(table.num_filled, table.block_size)
        _demand(full, "law 6, only the last block is partly filled", story)
        _demand(len(set(table.block_ids)) == len(table), "law 4, a block once a table", story)


def _check_owners(scheduler: Scheduler, allocator: Allocator) -> None:
    """Every table belongs to one running sequence, or to a plan in flight."""
    owned: list[BlockTable] = [
        sequence.table
        for request in scheduler.book
        for sequence in request.sequences
        if sequence.table is not None
    ]
    orphans = [table for sent in scheduler.steps.in_flight for table in sent.orphans]
    tables, known = Counter(map(id, [*owned, *orphans])), Counter(map(id, allocator.tables))
    story = f"{len(owned)} of sequences, {len(orphans)} of plans, {known.total()} handed out"
    _demand(tables == known, "law 4, every table has one owner", story)


def _check_usage(scheduler: Scheduler, allocator: Allocator) -> None:
    usage = scheduler.usage()
    held = {block_id for table in allocator.tables for block_id in table.block_ids}
    _demand(usage.num_used == len(held), "law 8, gauges", f"{usage}, {len(held)} blocks held")
    places = usage.tokens + usage.reserved + usage.internal + usage.external
    story = f"{usage} has {places} places in {len(held)} blocks"
    _demand(places == len(held) * allocator.block_size, "law 8, gauges", story)


def _check_lines(scheduler: Scheduler) -> None:
    book = scheduler.book
    for status in (Status.WAITING, Status.RUNNING, Status.SWAPPED):
        in_line = list(book.line(status))
        by_status = {r.request_id for r in book if r.status is status}
        story = f"{[r.request_id for r in in_line]} stand in the line, {sorted(by_status)} say so"
        _demand({r.request_id for r in in_line} == by_status, f"lines, {status}", story)
        _demand(len(in_line) == len(by_status), f"lines, {status}, each once", story)
        places = [(request.arrival, request.request_id) for request in in_line]
        _demand(places == sorted(places), f"lines, {status}, in order of arrival", str(places))
    most = min(scheduler.config.max_num_seqs, scheduler.config.max_num_batched_tokens)
    sequences = sum(len(request.live_sequences) for request in book.running)
    _demand(
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
    _demand(counted == (len(queued), prompts), "the queue's count", story)
    others = [r.request_id for r in queued if r.status is not Status.WAITING]
    _demand(not others, "the queue's count", f"{others} are queued and do not wait")


def _check_request(request: Request) -> None:
    who = f"{request.request_id} ({request.status})"
    is_over = request.status is Status.FINISHED
    story = f"{who} has {len(request.live_sequences)} live sequences"
    _demand(bool(request.live_sequences) != is_over, "finished means every sequence ended", story)
    for sequence in request.sequences:
        has_table, is_live = sequence.table is not None, sequence.finish is None
        story = f"{who}, sequence {sequence.index}, has {'a' if has_table else 'no'} block table"
        holds = request.status is Status.RUNNING and is_live
        _demand(has_table == holds, "law 5, running ones hold blocks, all or none", story)
        _check_progress(who, request, sequence)
    _check_scores(who, request)


def _check_progress(who: str, request: Request, sequence: Sequence) -> None:
    story = f"{who} computed {sequence.num_computed} of {sequence.num_tokens} tokens"
    _demand(sequence.num_computed <= sequence.num_tokens, "progress", story)
    if sequence.finish is None:
        story = f"{who} goes on with {len(sequence.generated)} of {request.max_tokens} tokens"
        wants_scores = not sequence.generated and request.num_unscored > 0
        wants_more = len(sequence.generated) < request.max_tokens or wants_scores
        _demand(wants_more, "max_tokens ends it", story)


def _check_scores(who: str, request: Request) -> None:
    """Log-probabilities are as many as was asked for, of the answer and of the prompt."""
    sampling, num_scores = request.submit.sampling, len(request.prompt_logprobs)
    for sequence in request.sequences:
        wanted = len(sequence.generated) if sampling.logprobs is not None else 0
        story = f"{who} has {len(sequence.logprobs)} logprobs of {len(sequence.generated)} tokens"
        _demand(len(sequence.logprobs) == wanted, "a logprob for each token", story)
    wanted = len(request.submit.prompt) - 1 if sampling.prompt_logprobs is not None else 0
    story = f"{who} has {num_scores} scores and lacks {request.num_unscored} of {wanted}"
    _demand(num_scores + request.num_unscored == wanted, "a score for each prompt token", story)
    if any(sequence.generated for sequence in request.sequences) and not request.submit.generated:
        _demand(not request.num_unscored, "a prompt is scored before its answer", story)


def _check_flight(scheduler: Scheduler) -> None:
    steps, most = scheduler.steps, scheduler.config.plans_in_flight
    ids = [sent.plan.step_id for sent in steps.in_flight]
    _demand(len(ids) <= most, "law 3, plans in flight", f"steps {ids}, at most {most}")
    _demand(ids == sorted(set(ids)), "law 3, step ids rise", f"steps {ids}")
    has_work = bool(scheduler.book.running or scheduler.book.waiting)
    if steps.is_joined and has_work:
        story = f"{scheduler.num_running} run, {scheduler.num_waiting} wait, no plan is in flight"
        _demand(bool(ids), "no stall", story)
    for sent in steps.in_flight:
        _check_plan(scheduler, sent)
    if not steps.in_flight:
        return
    newest = steps.in_flight[-1]
    for request in scheduler.book.running:
        for sequence in request.live_sequences:
            waits = sequence.num_computed == sequence.num_tokens
            row = newest.rows.get(sequence.sequence_id)
            is_drawn = row is not None and (row.does_sample or row.score is not None)
            story = f"{request.request_id} has all {sequence.num_tokens} tokens computed"
            _demand(not waits or is_drawn, "nothing to compute, so a draw is in flight", story)


def _check_plan(scheduler: Scheduler, sent: SentPlan) -> None:
    plan, allocator = sent.plan, scheduler.steps.allocator
    if allocator is None:
        raise InvariantBroken(f"plan {plan.step_id} is in flight and there is no pool")
    for row in plan.rows:
        lost = [b for b in row.block_table if not allocator.pool.ref_count(BlockId(b))]
        story = f"blocks {lost} of sequence {row.sequence_id} are free, step {plan.step_id} runs"
        _demand(not lost, "law 2, blocks of a plan in flight are held", story)
        need = blocks_in(row.first_position + len(row.token_ids), allocator.block_size)
        story = f"sequence {row.sequence_id}: {len(row.block_table)} blocks, {need} needed"
        _demand(len(row.block_table) == need, "law 6, a row's table ends at its tokens", story)
    suspects = [r.request_id for r in sent.requests if r.num_losses >= SUSPECT_AFTER_LOSSES]
    story = f"{suspects} share step {plan.step_id} with {len(sent.requests) - len(suspects)} others"
    _demand(not suspects or len(sent.requests) == 1, "a suspect runs alone", story)
    written = Counter(
        block_id
        for row in plan.rows
        for block_id in row.block_table[row.first_position // allocator.block_size :]
    )
    twice = sorted(block_id for block_id, times in written.items() if times > 1)
    _demand(not twice, "two rows write to one block", f"{twice} in step {plan.step_id}")
    sources, targets = {m.source for m in plan.copies}, [m.destination for m in plan.copies]
    story = f"copies {plan.copies}"
    _demand(not sources.intersection(targets), "law 9, source and destination", story)
    _demand(len(set(targets)) == len(targets), "law 9, destination twice", story)
    scored = sum(len(row.score.token_ids) for row in plan.rows if row.score is not None)
    most = scheduler.config.max_scored_tokens
    _demand(scored <= most, "score budget", f"{scored} scores, at most {most}")
    budget = scheduler.config.max_num_batched_tokens
    tokens = sum(len(row.token_ids) for row in plan.rows)
    _demand(0 < tokens <= budget, "token budget", f"{tokens} tokens, at most {budget}")


def _check_counters(scheduler: Scheduler) -> None:
    counters, in_flight = scheduler.counters, len(scheduler.steps.in_flight)
    over = counters.plans_finished + counters.plans_refused + counters.plans_lost
    story = f"{counters.plans_sent} sent, {over} over, {in_flight} in flight"
    _demand(counters.plans_sent == over + in_flight, "law 3, one result a plan", story)
    live = sum(request.is_live for request in scheduler.book)
    over = counters.requests_finished.total()
    story = f"{counters.requests_accepted} accepted, {over} finished, {live} live"
    _demand(counters.requests_accepted == over + live, "every request ends once", story)
