"""A house for the scheduler's core: real events in, real commands out, every law after each.

The executor here speaks the step protocol and keeps a store of (token, position) per place; its
next token is a hash of everything the row's block table reaches. So a wrong block, a stale place or
a missing token changes the answer, and `solo` says what the answer must be. Gateways here hold what
they were told and fail on a gap.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from services.scheduler.core.commands import Reply, RunStep
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    ExecutorJoined,
    ExecutorLost,
    Gateway,
    GatewayLost,
    RequestArrived,
    RequestDone,
    StepFinished,
    StepRefused,
    StreamsListed,
    Tick,
)
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.laws import check_laws
from services.scheduler.core.machine import Scheduler, SchedulerConfig
from shared.geometry import ModelShape, blocks_in
from shared.ids import Boot, RequestId
from shared.messages import (
    PREVIOUS,
    Accepted,
    Attach,
    Attached,
    Cancel,
    CancelReason,
    Costs,
    ExecutorReady,
    Finished,
    GeneratedSequence,
    PositionLogprobs,
    Refused,
    RowError,
    Sampled,
    Scored,
    StepFailed,
    StepPlan,
    StepResult,
    StreamPosition,
    Submit,
    Tokens,
)
from shared.sampling import FinishReason, SamplingParams

VOCAB = 40
EOS = 0
BOOT = Boot(17)


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


def placed(tokens):
    """The context of these tokens: each with its position."""
    return [(token_id, position) for position, token_id in enumerate(tokens)]


def solo_logprobs(prompt, sampling, answer):
    """What is reported of each token of an answer; () if nothing was asked for."""
    if sampling.logprobs is None:
        return ()
    tokens = (*prompt, *answer)
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
    for count in range(1, limit + 1):
        banned = stops if count <= sampling.min_tokens else ()
        seed = luck(_of_index(sampling.seed, index), sampling.draw, tokens, len(prompt))
        token_id = next_token(placed(tokens), seed, banned)
        tokens.append(token_id)
        if token_id in stops:
            return tuple(tokens[len(prompt) :]), FinishReason.STOP, token_id
    return tuple(tokens[len(prompt) :]), FinishReason.LENGTH, None


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
        drawn = {ask.sequence_id: None for row in plan.rows for ask in row.samples}
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
    """Holds what it was told; `is_deaf` loses every message on the way."""

    def __init__(self):
        self.streams = defaultdict(Stream)
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
                stream = self.streams[_key(request_id, sequence)]
                has_scores = len(stream.prompt_logprobs) >= stream.num_scores
                is_whole = has_scores or message.reason is not FinishReason.LENGTH
                if message.length == len(stream.tokens) and is_whole:
                    stream.finished = message
                    stream.num_finished += 1
                else:
                    assert self.may_gap, "Finished came before its tokens"
            case Refused(request_id):
                self.streams[request_id].refused = message
            case Attached(request_id):
                self.streams[request_id].attached = message
                self.streams[request_id].prompt_logprobs = message.prompt_logprobs
                for index, sequence in enumerate(message.sequences):
                    stream = self.streams[_key(request_id, index)]
                    stream.tokens = list(sequence.token_ids)
                    stream.logprobs = list(sequence.logprobs)

    def _take(self, run):
        stream = self.streams[_key(run.request_id, run.sequence)]
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
        held += run.token_ids[len(overlap) :]
        stream.logprobs += run.logprobs[len(overlap) :]


class House:
    """A scheduler, its gateways and its executor, driven by hand."""

    def __init__(
        self, num_blocks=16, block_size=4, *, free_order=None, max_model_len=256, join=True,
        num_cpu_blocks=0, costs=None, enable_prefix_caching=False, **config,
    ):  # fmt: skip
        config["enable_prefix_caching"] = enable_prefix_caching
        self.num_cpu_blocks = num_cpu_blocks
        self.costs = costs or Costs(64, 1e6, 1e3)

        def make_allocator(num_blocks, block_size):
            return PagedAllocator(BlockPool(num_blocks, free_order), block_size)

        self.core = Scheduler(SchedulerConfig(BOOT, **config), make_allocator)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_model_len = max_model_len
        self.now = 100.0
        self.gateways = defaultdict(ToyGateway)
        self.executor = None
        self.in_flight: list[StepPlan] = []
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.commands = []
        self.history = []
        self.events = []
        self.submits = {}
        if join:
            self.join()

    # ------------------------------------------------------------------ events

    def handle(self, event):
        """Give the core an event; carry out what it says; check every law."""
        self.events.append(event)
        commands = self.core.handle(event)
        self.commands = commands
        self.history.append(commands)
        told = [
            command.gateway
            for command in commands
            if isinstance(command, Reply) and isinstance(command.message, Tokens)
        ]
        if isinstance(event, StepFinished):
            assert len(told) == len(set(told)), "one message of tokens for each gateway and step"
        for command in commands:
            match command:
                case RunStep(plan):
                    assert self.executor is not None, "a plan without an executor"
                    assert plan.boot == BOOT
                    assert not self.plans or plan.step_id == self.plans[-1].step_id + 1
                    self._check_previous(plan)
                    self.plans.append(plan)
                    self.in_flight.append(plan)
                case Reply(gateway, message):
                    self.gateways[gateway].hear(message)
        check_laws(self.core)
        return commands

    def _check_previous(self, plan):
        """PREVIOUS stands where the plan before draws, and nowhere else."""
        before = self.plans[-1].rows if self.plans else ()
        drawn = {ask.sequence_id for row in before for ask in row.samples}
        goes_on = {row.sequence_id for row in plan.rows if row.token_ids[-1] == PREVIOUS}
        assert goes_on <= drawn, "PREVIOUS, and the plan before draws nothing for it"
        assert not goes_on or self.plans[-1].step_id == plan.step_id - 1
        assert not any(PREVIOUS in row.token_ids[:-1] for row in plan.rows)

    def later(self, seconds=0.001):
        self.now += seconds
        return self.now

    def join(self, num_blocks=None, block_size=None, vocab=VOCAB, eos=(EOS,), costs=None):
        self.num_blocks = num_blocks or self.num_blocks
        self.block_size = block_size or self.block_size
        self.executor = ToyExecutor(self.num_blocks, self.block_size, self.num_cpu_blocks)
        self.in_flight = []
        shape = ModelShape(1, 1, 1, 2, 2, vocab, self.max_model_len)
        ready = ExecutorReady(
            Boot(99), "toy", shape, self.block_size, self.num_blocks, self.num_cpu_blocks,
            self.max_model_len, eos,
            "int32", costs or self.costs,
        )  # fmt: skip
        return self.handle(ExecutorJoined(self.later(), ready))

    def lose_executor(self):
        self.executor, self.in_flight = None, []
        return self.handle(ExecutorLost(self.later()))

    def submit(
        self, name, prompt=5, max_tokens=8, *, gateway="g", generated=(), finish=None, age_s=0.0,
        context=b"", key_hash=b"", sampling=None, extra=None, **params,
    ):  # fmt: skip
        """`prompt` is a number of tokens (of the request's own) or the ids themselves."""
        if isinstance(prompt, int):
            prompt = tuple((ord(name[0]) * 7 + at * 3) % (VOCAB - 1) + 1 for at in range(prompt))
        params = sampling or SamplingParams(**{"max_tokens": max_tokens, **params})
        resumed = (GeneratedSequence(tuple(generated), finish),) if generated or finish else ()
        num_scores = 0 if params.prompt_logprobs is None else len(prompt) - 1
        fields = {"generated": resumed, "age_s": age_s, "context": context, "key_hash": key_hash}
        submit = Submit(RequestId(name), tuple(prompt), params, **{**fields, **(extra or {})})
        self.submits[name] = submit
        for index in range(params.n if params.n <= 128 else 1):
            so_far = submit.generated[index] if index < len(submit.generated) else _NOTHING
            stream = self.stream(name, gateway, index)
            stream.tokens, stream.logprobs = list(so_far.token_ids), list(so_far.logprobs)
        stream = self.stream(name, gateway)
        stream.prompt_logprobs, stream.num_scores = submit.prompt_logprobs, num_scores
        return self.handle(RequestArrived(self.later(), _gateway(gateway), submit))

    def step(self, times=1, failing_rows=()):
        """Run the first plan in flight, and give the core its result."""
        for _ in range(times):
            if self.executor.lacks(self.in_flight[0]):
                self.refuse_step("PREVIOUS, but nothing was drawn")
                continue
            plan = self.in_flight.pop(0)
            result = self.executor.run(plan, failing_rows)
            self.results.append(result)
            self.handle(StepFinished(self.later(), result))

    def refuse_step(self, message="cannot"):
        plan = self.in_flight.pop(0)
        return self.handle(StepRefused(self.later(), StepFailed(plan.boot, plan.step_id, message)))

    def run(self, most=5_000):
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not self.in_flight:
                return self
            self.step()
        raise AssertionError(f"still at work after {most} steps")

    def cancel(self, name, reason=CancelReason.CLIENT_GONE, sequence=None, gateway="g"):
        cancel = Cancel(RequestId(name), sequence, reason)
        return self.handle(CancelRequested(self.later(), _gateway(gateway), cancel))

    def stop_string(self, name, gateway="g", index=0):
        return self.cancel(name, CancelReason.STOP_STRING, index, gateway)

    def done(self, name, gateway="g"):
        return self.handle(RequestDone(self.later(), _gateway(gateway), RequestId(name)))

    def attach(self, name, gateway, key_hash=b""):
        attach = Attach(RequestId(name), key_hash)
        return self.handle(AttachRequested(self.later(), _gateway(gateway), attach))

    def beat(self, *names, gateway="g", positions=None):
        """A heartbeat that lists these streams as the gateway holds them."""
        streams = self.gateways[_gateway(gateway)].streams
        listed = tuple(
            StreamPosition(
                RequestId(name),
                tuple(len(streams[_key(name, index)].tokens) for index in range(self.width(name)))
                if positions is None
                else positions,
            )
            for name in names
        )
        return self.handle(StreamsListed(self.later(), _gateway(gateway), listed))

    def lose_gateway(self, gateway="g"):
        return self.handle(GatewayLost(self.later(), _gateway(gateway)))

    def tick(self, seconds=0.1):
        return self.handle(Tick(self.later(seconds)))

    # ------------------------------------------------------------------ what shows

    def stream(self, name, gateway="g", index=0):
        return self.gateways[_gateway(gateway)].streams[_key(name, index)]

    def tokens(self, name, gateway="g", index=0):
        return tuple(self.stream(name, gateway, index).tokens)

    def finish(self, name, gateway="g", index=0):
        finished = self.stream(name, gateway, index).finished
        return finished.reason if finished else None

    def width(self, name):
        """How many answers this request wants."""
        return self.submits[name].sampling.n if name in self.submits else 1

    def answers(self, name, gateway="g"):
        """All of what its gateway holds."""
        return [self.tokens(name, gateway, index) for index in range(self.width(name))]

    def solos(self, name, max_tokens=None):
        """All the answers of this request alone."""
        return [self.solo(name, max_tokens, index) for index in range(self.width(name))]

    def solo(self, name, max_tokens=None, index=0):
        """The answer of this request alone."""
        submit = self.submits[name]
        return solo(submit.prompt, submit.sampling, max_tokens, index)[0]

    def scores(self, name):
        """What is reported of this request's prompt when it is alone."""
        submit = self.submits[name]
        return solo_scores(submit.prompt, submit.sampling)

    def logprobs(self, name):
        """What is reported of this request's answer when it is alone."""
        submit = self.submits[name]
        return solo_logprobs(submit.prompt, submit.sampling, self.solo(name))

    def status(self, name):
        request = self.core.book.get(name)
        return request.status if request else None

    def sequence(self, name, index=0):
        return self.core.book.get(name).sequences[index]

    def table(self, name, index=0):
        """((physical block, # filled), ...) as in the paper's figures."""
        return self.sequence(name, index).table.entries()

    def ref_count(self, block_id):
        return self.core.steps.holdings.allocator.pool.ref_count(block_id)

    def replies(self, kind):
        """The messages of one kind in the last commands."""
        return [
            command.message
            for command in self.commands
            if isinstance(command, Reply) and isinstance(command.message, kind)
        ]

    def rows(self):
        """The rows of the newest plan, by request id: (first position, tokens, samples)."""
        names = {request.sequences[0].sequence_id: request.request_id for request in self.core.book}
        return {
            names.get(row.sequence_id): (
                row.first_position, len(row.token_ids), len(row.samples),
            )
            for row in self.plans[-1].rows
        }  # fmt: skip

    @property
    def free(self):
        """Blocks that nobody holds; what is in some of them may still be known."""
        return self.core.usage().num_free + self.core.usage().num_cached


_NOTHING = GeneratedSequence(())


def _gateway(name):
    return Gateway(name.encode())


def _key(name, index):
    """Where a gateway keeps one sequence of a request; the first is the request's own."""
    return (name, index) if index else name
