"""Toys that speak the real protocol: an executor, a gateway, and what an answer must be.

The executor keeps a store of (token, position) per place; its next token is a hash of everything
the row's block table reaches. So a wrong block, a stale place or a missing token changes the
answer, and `solo` says what the answer must be. A gateway holds what it was told and fails on a
gap.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b

from shared.geometry import blocks_in
from shared.messages import (
    PREVIOUS,
    Accepted,
    Attached,
    Finished,
    Pinned,
    Pins,
    PositionLogprobs,
    Refused,
    RowError,
    Sample,
    Sampled,
    Scored,
    StepResult,
    Tokens,
    Unpinned,
)
from shared.sampling import FinishReason
from tests.scheduler.core.plain_beams import plain_beams

VOCAB = 40
EOS = 0


def next_token(context, seed, banned):
    """What the toy says after `context`, a list of (token, position); eos about once in 40."""
    for attempt in range(10_000):
        story = repr((tuple(context), seed, attempt)).encode()
        token_id = int.from_bytes(blake2b(story, digest_size=8).digest(), "little") % VOCAB
        if token_id not in banned:
            return token_id
    raise AssertionError("everything is banned")


def logprobs_of(context, token_id, num_top):
    """What the toy reports of `token_id` after `context`."""
    story = repr((tuple(context), token_id)).encode()
    number = int.from_bytes(blake2b(story, digest_size=8).digest(), "little")
    return PositionLogprobs(
        -(number % 997) / 64, 1 + number % 7,
        tuple((number + at) % VOCAB for at in range(num_top)),
        tuple(-at / 8 for at in range(num_top)),
    )  # fmt: skip


def opinion(context):
    """What the toy takes each token to be worth after `context`: sixteenths, so that sums are exact
    and equals are frequent."""
    story = repr(("opinion", *context)).encode()
    return [-(byte % 80) / 16 for byte in blake2b(story, digest_size=VOCAB).digest()]


def report_of(context, num_top, token_id=None):
    """The likeliest tokens after `context`; `token_id` is another one to tell of than the first."""
    worth = opinion(context)
    best = sorted(range(VOCAB), key=lambda one: (-worth[one], one))
    chosen = worth[best[0] if token_id is None else token_id]
    return PositionLogprobs(
        chosen,
        1 + sum(value > chosen for value in worth),
        tuple(best[:num_top]),
        tuple(worth[one] for one in best[:num_top]),
    )


def placed(tokens):
    """The context of these tokens: each with its position."""
    return [(token_id, position) for position, token_id in enumerate(tokens)]


def solo_logprobs(prompt, sampling, answer):
    """What is reported of each token of an answer; () if nothing was asked for."""
    if sampling.logprobs is None:
        return ()
    tokens = (*prompt, *answer)
    if sampling.use_beam_search:
        return tuple(
            report_of(placed(tokens[:at]), sampling.logprobs, tokens[at])
            for at in range(len(prompt), len(tokens))
        )
    return tuple(
        logprobs_of(placed(tokens[:at]), tokens[at], sampling.logprobs)
        for at in range(len(prompt), len(tokens))
    )


def solo_scores(prompt, sampling):
    """What is reported of each prompt token but the first; () if nothing was asked for."""
    if sampling.prompt_logprobs is None:
        return ()
    return tuple(
        logprobs_of(placed(prompt[:at]), prompt[at], sampling.prompt_logprobs)
        for at in range(1, len(prompt))
    )


def luck(seed, draw, history, num_prompt):
    """What a draw depends on beside its context: for a penalty, on the history it is given."""
    return (seed, tuple(history), num_prompt) if draw.needs_history else seed


def _of_index(seed, index):
    """Every sequence of a request has a luck of its own."""
    return (seed, index) if index else seed


def solo(prompt, sampling, max_tokens=None, index=0):
    """(tokens, reason, stop token id) of a request that has the toy for itself, and no blocks."""
    limit = sampling.max_tokens if max_tokens is None else max_tokens
    tokens = list(prompt)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    if sampling.use_beam_search:
        return _solo_beam(prompt, sampling, limit, index, frozenset(stops))
    for count in range(1, limit + 1):
        banned = stops if count <= sampling.min_tokens else ()
        seed = luck(_of_index(sampling.seed, index), sampling.draw, tokens, len(prompt))
        token_id = next_token(placed(tokens), seed, banned)
        tokens.append(token_id)
        if token_id in stops:
            return tuple(tokens[len(prompt) :]), FinishReason.STOP, token_id
    return tuple(tokens[len(prompt) :]), FinishReason.LENGTH, None


def _solo_beam(prompt, sampling, limit, index, stops):
    found = _solo_beams(tuple(prompt), sampling, limit, stops)[index]
    if found.is_stopped:
        return found.tokens, FinishReason.STOP, found.tokens[-1]
    return found.tokens, FinishReason.LENGTH, None


@lru_cache(maxsize=1_000)
def _solo_beams(prompt, sampling, limit, stops):
    return plain_beams(lambda tokens: opinion(placed(tokens)), prompt, sampling, limit, stops)


class ToyExecutor:
    """One executor life: checks each plan like the real one, and runs it."""

    def __init__(self, num_blocks, block_size, num_cpu_blocks=0):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_cpu_blocks = num_cpu_blocks
        self.store, self.cpu_store = {}, {}
        self.drawn = {}

    def lacks(self, plan):
        """Whether this plan goes on from draws of the plan before it, which was not run."""
        has_previous = any(row.token_ids[-1] == PREVIOUS for row in plan.rows)
        return has_previous and plan.step_id - 1 not in self.drawn

    def run(self, plan, failing_rows=()):
        """The result of a plan; run twice in a row it does the same."""
        sampled, errors, scored, seen = [], [], [], set()
        for moves, source, target, targets in (
            (plan.swap_out, self.store, self.cpu_store, self.num_cpu_blocks),
            (plan.swap_in, self.cpu_store, self.store, self.num_blocks),
            (plan.copies, self.store, self.store, self.num_blocks),
        ):
            assert len({move.destination for move in moves}) == len(moves)
            copied = []
            for move in moves:
                assert 0 <= move.destination < targets
                for offset in range(self.block_size):
                    assert source is self.store or (move.source, offset) in source
                    copied.append(((move.destination, offset), source.get((move.source, offset))))
            target.update(copied)
        rows, lost = [], []
        for row in plan.rows:
            assert row.sequence_id not in seen, "a sequence has one row a plan"
            seen.add(row.sequence_id)
            if row.token_ids[-1] == PREVIOUS:
                token_id = self.drawn[plan.step_id - 1][row.sequence_id]
                if token_id is None:
                    lost.append(row)
                    continue
                row = _resolved(row, token_id)
            rows.append(row)
        errors += [RowError(row.sequence_id, "its token before failed") for row in lost]
        drawn = {ask.sequence_id: None for row in plan.rows for ask in row.samples if ask.draw}
        last_two = {step: it for step, it in self.drawn.items() if step >= plan.step_id - 1}
        self.drawn = {**last_two, plan.step_id: drawn}
        for row in rows:
            last = row.first_position + len(row.token_ids)
            assert row.token_ids
            assert len(row.block_table) == blocks_in(last, self.block_size)
            assert all(0 <= block_id < self.num_blocks for block_id in row.block_table)
            assert all(0 <= token_id < VOCAB for token_id in row.token_ids)
            for position, token_id in enumerate(row.token_ids, row.first_position):
                self.store[self._place(row, position)] = (token_id, position)
        for row in rows:
            if row.sequence_id in failing_rows:
                errors.append(RowError(row.sequence_id, "logits are not numbers"))
                continue
            last = row.first_position + len(row.token_ids)
            context = [self.store.get(self._place(row, position)) for position in range(last)]
            for ask in row.samples:
                if ask.draw is None:
                    assert ask == Sample(row.sequence_id, 0, 0, None, num_top=ask.num_top)
                    told = report_of(context, ask.num_top)
                    sampled.append(Sampled(ask.sequence_id, None, told))
                    continue
                assert ask.draw.needs_history == bool(ask.history)
                seed = luck(_of_index(ask.seed, ask.index), ask.draw, ask.history, ask.num_prompt)
                token_id = next_token(context, seed, ask.banned_ids)
                told = None if ask.num_top is None else logprobs_of(context, token_id, ask.num_top)
                sampled.append(Sampled(ask.sequence_id, token_id, told))
                drawn[ask.sequence_id] = token_id
            if row.score is not None:
                scored.append(self._score(row, context))
        return StepResult(plan.boot, plan.step_id, tuple(sampled), tuple(errors), tuple(scored))

    def _score(self, row, context):
        score, last = row.score, row.first_position + len(row.token_ids)
        assert score.token_ids
        assert row.first_position <= score.first_position
        assert score.first_position + len(score.token_ids) <= last
        for at, (token_id, _) in enumerate(context[score.first_position + 1 : last]):
            assert at >= len(score.token_ids) or score.token_ids[at] == token_id
        told = tuple(
            logprobs_of(context[: position + 1], token_id, score.num_top)
            for position, token_id in enumerate(score.token_ids, score.first_position)
        )
        return Scored(row.sequence_id, score.first_position, told)

    def _place(self, row, position):
        return row.block_table[position // self.block_size], position % self.block_size


def _resolved(row, token_id):
    """The row with the token its sequence drew in place of PREVIOUS."""
    samples = tuple(
        replace(ask, history=(*ask.history[:-1], token_id))
        if ask.history and ask.history[-1] == PREVIOUS
        else ask
        for ask in row.samples
    )
    return replace(row, token_ids=(*row.token_ids[:-1], token_id), samples=samples)


@dataclass
class Stream:
    """What one gateway knows of one sequence; what concerns the request is with the first one."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: tuple = ()
    num_scores: int = 0
    max_tokens: int | None = None
    finished: Finished | None = None
    num_finished: int = 0
    refused: Refused | None = None
    attached: Attached | None = None


class ToyGateway:
    """Holds what it was told, of each end the first; `is_deaf` loses every message on the way."""

    def __init__(self):
        self.streams = defaultdict(Stream)
        self.pinned, self.unpinned, self.pins = {}, [], None
        self.is_deaf = False
        self.may_gap = False

    def hear(self, message):
        if self.is_deaf:
            return
        match message:
            case Accepted(request_id, max_tokens):
                self.streams[request_id].max_tokens = max_tokens
            case Tokens(items):
                for run in items:
                    self._take(run)
            case Finished(request_id, sequence):
                stream = self.streams[key_of(request_id, sequence)]
                if stream.finished is not None:  # told again, if need be by another scheduler
                    stream.num_finished += 1
                    return
                has_scores = len(stream.prompt_logprobs) >= stream.num_scores
                is_whole = has_scores or message.reason is not FinishReason.LENGTH
                if message.length == len(stream.tokens) and is_whole:
                    stream.finished = message
                    stream.num_finished += 1
                else:
                    assert self.may_gap, "Finished came before its tokens"
            case Refused(request_id):
                self.streams[request_id].refused = message
            case Pinned(pin_id):
                self.pinned[pin_id] = message
            case Unpinned(pin_id):
                self.unpinned.append(pin_id)
            case Pins():
                self.pins = message
            case Attached(submit):
                request_id = submit.request_id
                self.streams[request_id].attached = message
                self.streams[request_id].prompt_logprobs = message.prompt_logprobs
                for index, sequence in enumerate(message.sequences):
                    stream = self.streams[key_of(request_id, index)]
                    stream.tokens = list(sequence.token_ids)
                    stream.logprobs = list(sequence.logprobs)
                    stream.finished = None

    def _take(self, run):
        stream = self.streams[key_of(run.request_id, run.sequence)]
        held = stream.tokens
        assert run.token_ids or run.prompt_logprobs
        assert run.start == 0 or not run.prompt_logprobs
        assert len(run.logprobs) in (0, len(run.token_ids))
        if run.start == 0:
            assert stream.prompt_logprobs in ((), run.prompt_logprobs)
            stream.prompt_logprobs = run.prompt_logprobs
        if run.start > len(held):
            assert self.may_gap, f"a gap before {run}"
            return
        overlap = held[run.start : run.start + len(run.token_ids)]
        assert overlap == list(run.token_ids[: len(overlap)]), "what was told has changed"
        if stream.finished is not None:
            return  # nobody reads on
        held += run.token_ids[len(overlap) :]
        stream.logprobs += run.logprobs[len(overlap) :]


def key_of(name, index):
    """Where a gateway keeps one sequence of a request; the first is the request's own."""
    return (name, index) if index else name
