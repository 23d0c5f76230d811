"""A house for the scheduler's core: real events in, real commands out, every law after each.

Its executor and its gateways are those of toys.py.
"""

from collections import defaultdict

from services.scheduler.core.commands import Reply, RunStep
from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    DetachRequested,
    ExecutorJoined,
    ExecutorLost,
    Gateway,
    GatewayLost,
    PinRequested,
    PinsListed,
    RequestArrived,
    RequestDone,
    StepFinished,
    StepRefused,
    StreamsListed,
    Tick,
    UnpinRequested,
)
from services.scheduler.core.kv.paged import PagedAllocator
from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.laws import check_laws
from services.scheduler.core.lifecycle import Status
from services.scheduler.core.machine import Scheduler, SchedulerConfig
from shared.geometry import ModelShape
from shared.ids import Boot, RequestId
from shared.messages import (
    PREVIOUS,
    Attach,
    Cancel,
    CancelReason,
    Costs,
    Detach,
    ExecutorReady,
    GeneratedSequence,
    ListPins,
    Pin,
    StepFailed,
    StepPlan,
    StepResult,
    StreamPosition,
    Submit,
    Tokens,
    Unpin,
)
from shared.sampling import SamplingParams
from tests.scheduler.core.toys import (
    EOS,
    VOCAB,
    ToyExecutor,
    ToyGateway,
    key_of,
    solo,
    solo_logprobs,
    solo_scores,
)

BOOT = Boot(17)


class House:
    """A scheduler, its gateways and its executor, driven by hand."""

    def __init__(
        self, num_blocks=16, block_size=4, *, free_order=None, max_model_len=256, join=True,
        num_cpu_blocks=0, costs=None, enable_prefix_caching=False, laws_every=1, **config,
    ):  # fmt: skip
        """The laws are checked after every `laws_every`th event."""
        config["enable_prefix_caching"] = enable_prefix_caching
        self.num_cpu_blocks, self.laws_every = num_cpu_blocks, laws_every
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
        ran = list(self.core.book.running)
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
                    self._check_progress(plan)
                    self._check_victims(plan, ran)
                    self.plans.append(plan)
                    self.in_flight.append(plan)
                case Reply(gateway, message):
                    self.gateways[gateway].hear(message)
        if len(self.events) % self.laws_every == 0:
            check_laws(self.core)
        return commands

    def _check_previous(self, plan):
        """PREVIOUS stands where the plan before draws, and nowhere else."""
        before = self.plans[-1].rows if self.plans else ()
        drawn = {ask.sequence_id for row in before for ask in row.samples if ask.draw}
        goes_on = {row.sequence_id for row in plan.rows if row.token_ids[-1] == PREVIOUS}
        assert goes_on <= drawn, "PREVIOUS, and the plan before draws nothing for it"
        assert not goes_on or self.plans[-1].step_id == plan.step_id - 1
        assert not any(PREVIOUS in row.token_ids[:-1] for row in plan.rows)

    def _check_progress(self, plan):
        """Who gives way again has more tokens than before, unless its executor was lost since."""
        told = {preemption.sequence_id for preemption in plan.preemptions}
        sent = [command.plan for command in self.commands if isinstance(command, RunStep)]
        drawn_since = [
            ask.sequence_id
            for later in sent
            if later.step_id >= plan.step_id  # who gave way may be back in the same plan
            for row in later.rows
            for ask in row.samples
            if ask.draw
        ]
        for request in self.core.book.everyone:
            if told and any(one.sequence_id in told for one in request.every_sequence):
                num_tokens = sum(
                    one.num_drawn - drawn_since.count(one.sequence_id)
                    for one in request.every_sequence
                )
                before = self.gave_way.get(request, -1)
                assert num_tokens > before, f"{request.request_id} gave way twice at {num_tokens}"
                self.gave_way[request] = num_tokens

    def _check_victims(self, plan, ran):
        """Of those who `ran`, nobody gave way before one later in the order, but protected ones.

        A plan tells too of those who gave way before, when none could be made: not looked at here,
        as others may have lost their protection since.
        """
        place, told = self.core.book.order.place, {one.sequence_id for one in plan.preemptions}
        for victim in ran if told else ():
            waits = victim.status in (Status.WAITING, Status.SWAPPED)
            if waits and any(one.sequence_id in told for one in victim.every_sequence):
                later = [r for r in self.core.book.running if place(r) > place(victim)]
                assert all(r.is_protected for r in later), f"{victim.request_id} gave way too early"

    def later(self, seconds=0.001):
        self.now += seconds
        return self.now

    def join(self, num_blocks=None, block_size=None, vocab=VOCAB, eos=(EOS,), costs=None):
        self.num_blocks = num_blocks or self.num_blocks
        self.block_size = block_size or self.block_size
        self.gave_way = {}
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
        self.executor, self.in_flight, self.gave_way = None, [], {}
        return self.handle(ExecutorLost(self.later()))

    def submit(
        self, name, prompt=5, max_tokens=8, *, gateway="g", generated=(), finish=None, age_s=0.0,
        context=b"c", key_hash=b"", sampling=None, extra=None, **params,
    ):  # fmt: skip
        """`prompt` is a number of tokens (of the request's own) or the ids themselves; without a
        context it does not outlive its gateway."""
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
        self.gave_way = {}
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

    def detach(self, name, gateway="g", *, is_told=False):
        detach = Detach(RequestId(name), is_told)
        return self.handle(DetachRequested(self.later(), _gateway(gateway), detach))

    def beat(self, *names, gateway="g", positions=None):
        """A heartbeat that lists these streams as the gateway holds them."""
        streams = self.gateways[_gateway(gateway)].streams
        listed = tuple(
            StreamPosition(
                RequestId(name),
                tuple(len(streams[key_of(name, index)].tokens) for index in range(self.width(name)))
                if positions is None
                else positions,
            )
            for name in names
        )
        return self.handle(StreamsListed(self.later(), _gateway(gateway), listed))

    def lose_gateway(self, gateway="g"):
        return self.handle(GatewayLost(self.later(), _gateway(gateway)))

    def pin(self, name, tokens, *, gateway="g", key_hash=b"", cache_salt="", context=b""):
        pin = Pin(RequestId(name), tuple(tokens), cache_salt, key_hash, context)
        return self.handle(PinRequested(self.later(), _gateway(gateway), pin))

    def unpin(self, name, *, gateway="g", key_hash=b""):
        unpin = Unpin(RequestId(name), key_hash)
        return self.handle(UnpinRequested(self.later(), _gateway(gateway), unpin))

    def pins(self, *, gateway="g", key_hash=b""):
        """What the list of pinned prefixes says, by name."""
        query = ListPins(RequestId("query"), key_hash)
        self.handle(PinsListed(self.later(), _gateway(gateway), query))
        return {item.pin_id: item for item in self.gateways[_gateway(gateway)].pins.items}

    def tick(self, seconds=0.1):
        return self.handle(Tick(self.later(seconds)))

    # ------------------------------------------------------------------ what shows

    def stream(self, name, gateway="g", index=0):
        return self.gateways[_gateway(gateway)].streams[key_of(name, index)]

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

    def pin_table(self, name):
        """The same of a pinned prefix."""
        return self.core.book.pins.get(RequestId(name)).request.sequences[0].table.entries()

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
