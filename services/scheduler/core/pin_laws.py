"""The laws of pinned prefixes. Raises: InvariantBroken, by laws.py's word."""

from services.scheduler.core.intake import need_of
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.machine import Scheduler
from shared.errors import InvariantBroken
from shared.geometry import blocks_in


def check_pins(scheduler: Scheduler) -> None:
    """What is pinned is held, never swapped, within the budget, and leaves room for everybody."""
    book, holdings = scheduler.book, scheduler.steps.holdings
    for prefix in book.pins:
        request, who = prefix.request, prefix.pin.pin_id
        table = request.sequences[0].table
        if request.status not in (Status.WAITING, Status.RUNNING, Status.PINNED):
            raise InvariantBroken(f"pins, never swapped or over: {who} is {request.status}")
        num_held = table.num_filled if table is not None else 0
        if prefix.is_ready and num_held != len(prefix.pin.token_ids):
            raise InvariantBroken(f"pins, all of it is held: {num_held} tokens of {who}")
        if not request.is_protected:
            raise InvariantBroken(f"pins, give way to nobody: {who} would")
    if holdings is None:
        return
    size, num_blocks = holdings.allocator.block_size, holdings.allocator.pool.num_blocks
    kept = sum(blocks_in(len(prefix.pin.token_ids), size) for prefix in book.pins)
    most = int(scheduler.config.max_pinned_share * num_blocks)
    if kept > most:
        raise InvariantBroken(f"pins, the budget: {kept} blocks are kept, at most {most}")
    for request in book:
        need = need_of(request.submit, request.max_tokens, size) if request.is_live else 0
        if need + kept > num_blocks:
            raise InvariantBroken(
                f"pins, everybody fits beside them: {request.request_id} may need {need}, {kept} "
                f"of {num_blocks} blocks are kept"
            )
