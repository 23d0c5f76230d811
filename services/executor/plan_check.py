"""Every plan is checked before anything of it runs: a bad one is a `StepFailed`, not a crash.

The scheduler is ours, but a bug in it must not become a write into somebody else's block. So this
module trusts nothing: what passes here cannot make native code read or write out of bounds, and
cannot mix up two sequences.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from services.executor.batch import FlatRows, flatten
from services.executor.sample_check import wrong_with_sample, wrong_with_score
from shared.errors import SplitflapError
from shared.ids import SequenceId
from shared.messages import MAX_SCORED_TOKENS, PREVIOUS, Row, StepPlan
from shared.sampling import unknown_ids


class BadPlan(SplitflapError):
    """The scheduler sent a plan that must not run; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan has to respect."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LastStep:
    """What the executor remembers of the last plan it ran: its number, and who drew in it.

    A sequence whose row failed is among them: it should have drawn.
    """

    step_id: int
    drawing: AbstractSet[SequenceId] = frozenset()


def check_plan(plan: StepPlan, limits: PlanLimits, last: LastStep | None) -> FlatRows:
    """The rows of `plan` as flat arrays, if every law holds that can be seen from here.

    Raises: BadPlan.
    """
    if last is not None and plan.step_id <= last.step_id:
        raise BadPlan(f"step {plan.step_id} comes after step {last.step_id}; ids must grow")
    _check_moves(plan, limits)
    try:
        flat = flatten(plan.rows, limits.block_size)
    except OverflowError as error:
        raise BadPlan(f"a number in a row is beyond 64 bits ({error})") from error
    if plan.rows:
        _check_sequences(plan.rows)
        _check_places(plan.rows, limits)
        _check_tables(plan.rows, flat, limits)
        _check_tokens(plan, flat, limits, last)
        _check_wishes(plan.rows, limits.vocab_size)
    return flat


# --------------------------------------------------------------------------- moves and copies


def _check_moves(plan: StepPlan, limits: PlanLimits) -> None:
    if not (plan.swap_out or plan.swap_in or plan.copies):
        return
    gpu, cpu = ("gpu", limits.num_gpu_blocks), ("cpu", limits.num_cpu_blocks)
    for name, moves, source, destination in (
        ("swap_out", plan.swap_out, gpu, cpu),
        ("swap_in", plan.swap_in, cpu, gpu),
        ("copies", plan.copies, gpu, gpu),
    ):
        _check_in_pool(name, "source", (move.source for move in moves), *source)
        _check_in_pool(name, "destination", (move.destination for move in moves), *destination)
        _refuse_repeats(f"{name}: destination twice", [move.destination for move in moves])
    sources = {move.source for move in plan.copies}
    destinations = {move.destination for move in plan.copies}
    _refuse_common("copies: both source and destination", sources, destinations)
    # Parts run in their order, so these would read or keep what the part before overwrote.
    written_by_swap_in = {move.destination for move in plan.swap_in}
    _refuse_common("swap_in and copies: destination twice", written_by_swap_in, destinations)
    _refuse_common(
        "swap_out, then swap_in: destination is source",
        {move.destination for move in plan.swap_out},
        {move.source for move in plan.swap_in},
    )


def _check_in_pool(name: str, end: str, blocks: Iterable[int], pool: str, num_blocks: int) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise BadPlan(f"{name}: {end} {block} is not in the {pool} pool of {num_blocks} blocks")


def _refuse_repeats(what: str, numbers: Sequence[int]) -> None:
    if len(set(numbers)) < len(numbers):
        raise BadPlan(f"{what}: {Counter(numbers).most_common(1)[0][0]}")


def _refuse_common(what: str, left: AbstractSet[int], right: AbstractSet[int]) -> None:
    common = left & right
    if common:
        raise BadPlan(f"{what}: block {min(common)}")


# --------------------------------------------------------------------------- rows


def _name(row: Row) -> str:
    return f"row of sequence {row.sequence_id}"


def _check_sequences(rows: Sequence[Row]) -> None:
    _refuse_repeats("a sequence has two rows", [row.sequence_id for row in rows])
    _refuse_repeats(
        "a sequence has two samples",
        [sample.sequence_id for row in rows for sample in row.samples],
    )


def _check_places(rows: Sequence[Row], limits: PlanLimits) -> None:
    longest = limits.max_model_len
    for row in rows:
        length = row.first_position + len(row.token_ids)
        if not row.token_ids:
            raise BadPlan(f"{_name(row)}: no tokens")
        if not 0 <= row.first_position < longest:
            raise BadPlan(f"{_name(row)}: first position not in 0..{longest - 1}")
        if length > longest:
            raise BadPlan(f"{_name(row)}: longer than max_model_len {longest}")
        if len(row.block_table) * limits.block_size < length:
            raise BadPlan(f"{_name(row)}: its block table does not cover its tokens")


def _check_tables(rows: Sequence[Row], flat: FlatRows, limits: PlanLimits) -> None:
    blocks, num_blocks = flat.blocks, limits.num_gpu_blocks
    if blocks.min() < 0 or blocks.max() >= num_blocks:
        wrong = next(row for row in rows if unknown_ids(row.block_table, num_blocks))
        raise BadPlan(f"{_name(wrong)}: a block is not in the pool of {num_blocks} blocks")
    # A block that is written may be in one table, and there once: copy-on-write saw to the rest.
    is_shared = np.bincount(blocks)[flat.written] > 1
    if is_shared.any():
        wrong = rows[flat.row_of_token[is_shared.argmax()]]
        raise BadPlan(f"{_name(wrong)}: it writes into a block that is in use twice")


def _check_tokens(
    plan: StepPlan, flat: FlatRows, limits: PlanLimits, last: LastStep | None
) -> None:
    least, greatest = flat.token_ids.min(), flat.token_ids.max()
    if least < PREVIOUS or greatest >= limits.vocab_size:
        is_wrong = (flat.token_ids < PREVIOUS) | (flat.token_ids >= limits.vocab_size)
        wrong = plan.rows[flat.row_of_token[is_wrong.argmax()]]
        vocabulary = f"0..{limits.vocab_size - 1}"
        raise BadPlan(f"{_name(wrong)}: a token id is not in the vocabulary {vocabulary}")
    if least == PREVIOUS:
        _check_previous(plan, flat, last)


def _check_previous(plan: StepPlan, flat: FlatRows, last: LastStep | None) -> None:
    is_previous = flat.token_ids == PREVIOUS
    is_previous[flat.row_starts[1:] - 1] = False
    if is_previous.any():
        wrong = plan.rows[flat.row_of_token[is_previous.argmax()]]
        raise BadPlan(f"{_name(wrong)}: PREVIOUS is not its last token")
    for row in plan.rows:
        if row.token_ids[-1] != PREVIOUS:
            continue
        if last is None or last.step_id != plan.step_id - 1:
            ran = "none" if last is None else f"step {last.step_id}"
            raise BadPlan(
                f"{_name(row)}: PREVIOUS means step {plan.step_id - 1}, the last to run is {ran}"
            )
        if row.sequence_id not in last.drawing:
            raise BadPlan(f"{_name(row)}: PREVIOUS, but step {last.step_id} drew nothing for it")


# --------------------------------------------------------------------------- samples and scores


def _check_wishes(rows: Sequence[Row], vocab_size: int) -> None:
    for row in rows:
        for sample in row.samples:
            wrong = wrong_with_sample(row, sample, vocab_size)
            if wrong:
                raise BadPlan(f"{_name(row)}, sample of sequence {sample.sequence_id}: {wrong}")
        if row.score is not None:
            wrong = wrong_with_score(row, row.score, vocab_size)
            if wrong:
                raise BadPlan(f"{_name(row)}, score: {wrong}")
    num_scored = sum(len(row.score.token_ids) for row in rows if row.score is not None)
    if num_scored > MAX_SCORED_TOKENS:
        raise BadPlan(f"{num_scored} tokens to score; a plan has {MAX_SCORED_TOKENS} at most")
