"""The laws of plans in flight. Raises: InvariantBroken, by laws.py's word."""

from collections import Counter

from services.scheduler.core.flight import SentPlan
from services.scheduler.core.holdings import Holdings
from services.scheduler.core.law import demand
from services.scheduler.core.machine import Scheduler
from shared.errors import InvariantBroken
from shared.geometry import blocks_in
from shared.messages import StepPlan


def check_flight(scheduler: Scheduler) -> None:
    """Plans in flight are few and in order, and what they name is held.

    Whoever has all computed has a row in one.
    """
    steps, most = scheduler.steps, scheduler.config.plans_in_flight
    ids = [sent.plan.step_id for sent in steps.in_flight]
    demand(len(ids) <= most, "law 3, plans in flight", f"steps {ids}, at most {most}")
    demand(ids == sorted(set(ids)), "law 3, step ids rise", f"steps {ids}")
    book = scheduler.book
    has_work = bool(book.running or book.waiting or book.swapped)
    if steps.is_joined and has_work:
        story = f"{scheduler.num_running} run, {scheduler.num_waiting} wait, no plan is in flight"
        demand(bool(ids), "no stall", story)
    for sent in steps.in_flight:
        _check_plan(scheduler, sent)
    if not steps.in_flight:
        return
    due = {
        row.request
        for sent in steps.in_flight
        for row in sent.rows.values()
        if row.score is not None or row.request.is_pin
    }
    told = {row.sequence for sent in steps.in_flight for row in sent.rows.values() if row.is_report}
    for request in scheduler.book.running:
        told.update(beam for beam in request.beams if beam.report is not None)
        for sequence in request.live_sequences:
            waits = sequence.table is not None and not sequence.num_to_compute
            story = f"{request.request_id} has all {sequence.num_wanted} tokens computed"
            is_due = sequence.ahead > 0 or request in due or sequence in told
            demand(not waits or is_due, "nothing to compute, so a row is in flight", story)


def _check_plan(scheduler: Scheduler, sent: SentPlan) -> None:
    plan, holdings = sent.plan, scheduler.steps.holdings
    if holdings is None:
        raise InvariantBroken(f"plan {plan.step_id} is in flight and there is no pool")
    allocator = holdings.allocator
    _check_named(plan, holdings)
    for row in plan.rows:
        need = blocks_in(row.first_position + len(row.token_ids), allocator.block_size)
        story = f"sequence {row.sequence_id}: {len(row.block_table)} blocks, {need} needed"
        demand(len(row.block_table) == need, "law 6, a row's table ends at its tokens", story)
    suspects = [request.request_id for request in sent.requests if request.is_suspect]
    story = f"{suspects} share step {plan.step_id} with {len(sent.requests) - len(suspects)} others"
    demand(not suspects or len(sent.requests) == 1, "a suspect runs alone", story)
    written = Counter(
        block_id
        for row in plan.rows
        for block_id in row.block_table[row.first_position // allocator.block_size :]
    )
    twice = sorted(block_id for block_id, times in written.items() if times > 1)
    demand(not twice, "two rows write to one block", f"{twice} in step {plan.step_id}")
    sources, targets = {m.source for m in plan.copies}, [m.destination for m in plan.copies]
    story = f"copies {plan.copies}"
    demand(not sources.intersection(targets), "law 9, source and destination", story)
    demand(len(set(targets)) == len(targets), "law 9, destination twice", story)
    scored = sum(len(row.score.token_ids) for row in plan.rows if row.score is not None)
    most = scheduler.config.max_scored_tokens
    demand(scored <= most, "score budget", f"{scored} scores, at most {most}")
    budget = scheduler.config.max_num_batched_tokens
    tokens = sum(len(row.token_ids) for row in plan.rows)
    story = f"{tokens} tokens, at most {budget}"
    demand(tokens > 0 or bool(plan.swap_out), "token budget", story)
    demand(tokens <= budget, "token budget", story)


def _check_named(plan: StepPlan, holdings: Holdings) -> None:
    """No block that a plan in flight names could be handed out."""
    gpu = {block_id for row in plan.rows for block_id in row.block_table}
    gpu.update(block_id for move in plan.copies for block_id in (move.source, move.destination))
    gpu.update(move.source for move in plan.swap_out)
    gpu.update(move.destination for move in plan.swap_in)
    cpu = {move.destination for move in plan.swap_out} | {move.source for move in plan.swap_in}
    for name, named, pool in (
        ("gpu", gpu, holdings.allocator.pool),
        ("cpu", cpu, holdings.cpu.pool),
    ):
        lost = sorted(named.intersection((*pool.free_blocks, *pool.cached_blocks)))
        story = f"{name} blocks {lost} could be handed out, step {plan.step_id} runs"
        demand(not lost, "law 2, blocks of a plan in flight are held", story)
    for name, moves in (("swap_out", plan.swap_out), ("swap_in", plan.swap_in)):
        targets = [move.destination for move in moves]
        demand(len(set(targets)) == len(targets), "law 9, destination twice", f"{name} {moves}")
