"""Everything that can happen to a scheduler, as moves that a random walk can choose from.

After each move the laws hold (the house sees to it) and every answer so far is the beginning of the
answer the request would get alone. `end` brings all to its end and checks the answers whole.
"""

from collections import Counter
from dataclasses import replace
from random import Random

from services.scheduler.core.events import StepFinished
from shared.errors import ErrorCode
from shared.ids import Boot
from shared.messages import CancelReason, GeneratedSequence
from shared.sampling import DrawParams, FinishReason, SamplingParams
from tests.scheduler.core.house import VOCAB, House, solo, solo_logprobs, solo_scores

GATEWAYS = "gh"
PENALTY = DrawParams(presence_penalty=0.5)
MOST_LIVE = 12


class Walker:
    """A house, and what a plain memory of the walk knows about each request."""

    def __init__(self, **house):
        self.house = House(**house)
        self.settings = house
        self.owners = {}
        self.answers, self.logprobs, self.scores = {}, {}, {}
        self.may_fail = set()
        self.over = set()
        self.count = 0
        self.happened = Counter()

    # ------------------------------------------------------------------ moves

    def submit(self, prompt, max_tokens, gateway, params, age_s=0.0):
        """`params`: keyword arguments of SamplingParams beside max_tokens."""
        if len(self.owners) >= MOST_LIVE:
            return
        self.count += 1
        name = f"{self.count:03d}"
        house, sampling = self.house, SamplingParams(max_tokens=max_tokens, **params)
        self.owners[name] = gateway
        ids = tuple((self.count * 5 + at * at) % (VOCAB - 1) + 1 for at in range(prompt))
        most = house.max_model_len - prompt if max_tokens is None else max_tokens
        most = min(most, 4 * house.block_size * house.num_blocks)
        answer = solo(ids, sampling, most)[0]
        self.answers[name] = answer
        self.logprobs[name] = solo_logprobs(ids, sampling, answer)
        self.scores[name] = solo_scores(ids, sampling)
        house.submit(name, ids, gateway=gateway, sampling=sampling, age_s=age_s)
        if refusal := self._stream(name).refused:
            self._forget(name)
            self.happened[str(refusal.code)] += 1

    def step(self, times=1):
        for _ in range(times):
            if self.house.in_flight:
                self.house.step()
                self.happened["step"] += 1

    def step_with_row_error(self, which):
        if not self.house.in_flight:
            return
        rows = self.house.in_flight[0].rows
        sequence_id = rows[which % len(rows)].sequence_id
        self.may_fail.update(self._names_of({sequence_id}))
        self.house.step(failing_rows={sequence_id})
        self.happened["row error"] += 1

    def late_result(self, which, is_ours):
        """A result nobody waits for: of a step long over, or of another scheduler's plan."""
        results, plans = self.house.results, self.house.in_flight
        if is_ours and results:
            result = results[which % len(results)]
        elif not is_ours and plans:
            result = replace(self.house.executor.run(plans[0]), boot=Boot(1))
        else:
            return
        before = self.house.core.counters.results_dropped
        commands = self.house.handle(StepFinished(self.house.later(), result))
        assert commands == []
        assert self.house.core.counters.results_dropped == before + 1
        self.happened["late result"] += 1

    def refuse_step(self):
        if self.house.in_flight:
            ids = {row.sequence_id for row in self.house.in_flight[0].rows}
            self.may_fail.update(self._names_of(ids))
            self.house.refuse_step()
            self.happened["refused step"] += 1

    def cancel(self, which):
        if name := self._pick(which):
            self.house.cancel(name, gateway=self.owners[name])
            self._forget(name)
            self.happened["cancel"] += 1

    def stop_string(self, which):
        name = self._pick(which)
        if name and not self._is_deaf(name):
            self.over.add(name)
            self.house.cancel(name, CancelReason.STOP_STRING, 0, gateway=self.owners[name])
            self.happened["stop string"] += 1

    def done(self, which):
        name = self._pick(which)
        if name and self._stream(name).finished:
            self._check_whole(name)
            self.house.done(name, gateway=self.owners[name])
            self._forget(name)
            self.happened["done"] += 1

    def attach(self, which, gateway):
        name = self._pick(which)
        if name is None or self.house.executor is None or self.house.status(name) is None:
            return
        if self._is_deaf(name) or self.house.gateways[gateway.encode()].is_deaf:
            return
        held = self.house.stream(name, gateway)
        held.max_tokens = self._stream(name).max_tokens
        held.num_scores = self._stream(name).num_scores
        self.house.attach(name, gateway)
        self.owners[name] = gateway
        self.happened["attach"] += 1

    def submit_again(self, which):
        name = self._pick(which)
        if name:
            self._resubmit(name, self._so_far(name))
            self.happened["submit again"] += 1

    def beat(self, gateway):
        names = [name for name, owner in self.owners.items() if owner == gateway]
        self.house.beat(*names, gateway=gateway)

    def turn_deaf(self, gateway):
        listener = self.house.gateways[gateway.encode()]
        listener.is_deaf = listener.may_gap = True
        self.happened["deaf"] += 1

    def hear_again(self, gateway):
        self.house.gateways[gateway.encode()].is_deaf = False

    def lose_gateway(self, gateway):
        self.house.lose_gateway(gateway)
        for name in [name for name, owner in self.owners.items() if owner == gateway]:
            self._forget(name)
        self.happened["gateway lost"] += 1

    def lose_executor(self):
        if self.house.executor is not None:
            for request in self.house.core.book:
                if request.num_losses >= 2:
                    self.may_fail.add(request.request_id)
            self.house.results += map(self.house.executor.run, self.house.in_flight)
            self.house.lose_executor()
            self.happened["executor lost"] += 1

    def join(self, num_blocks=None):
        """Join a new executor; one with another number of blocks may end requests."""
        if num_blocks not in (None, self.house.num_blocks) or self.house.executor is not None:
            self.may_fail.update(self.owners)
        self.house.join(num_blocks)

    def restart(self):
        """The scheduler dies; its gateways submit what they hold to the next one."""
        old, self.house = self.house, House(**{**self.settings, "join": False})
        self.house.gateways, self.house.now = old.gateways, old.now
        self.house.submits, self.house.history = old.submits, old.history
        for gateway in self.house.gateways.values():
            gateway.is_deaf = False
        for name in self.owners:
            stream = self._stream(name)
            finish = stream.finished.reason if stream.finished else None
            is_new = finish is None and not stream.tokens
            self._resubmit(name, () if is_new else self._so_far(name, finish), resubmitted=True)
        self.house.join(old.num_blocks)
        for name in self.owners:
            refusal = self._stream(name).refused
            assert refusal is None or refusal.code is not ErrorCode.QUEUE_FULL, refusal.message
        self._drop_refused()
        self.happened["restart"] += 1

    def tick(self, seconds):
        self.house.tick(seconds)

    # ------------------------------------------------------------------ checks

    def check(self):
        """What must hold between any two moves."""
        self.happened["preemption"] = max(
            self.happened["preemption"], self.house.core.counters.preemptions.total()
        )
        self._drop_refused()
        for name in self.owners:
            stream, answer, scores = self._stream(name), self.answers[name], self.scores[name]
            held = tuple(stream.tokens)
            assert held == answer[: len(held)], f"{name} went astray"
            told = self.logprobs[name][: len(held)]
            assert tuple(stream.logprobs) == told, f"{name}: its logprobs went astray"
            assert stream.prompt_logprobs in ((), scores), f"{name}: its scores went astray"
            if held and scores:
                assert stream.prompt_logprobs, f"{name}: its scores were left out"
                self.happened["scored"] += 1

    def end(self):
        """Mend everything, run to the end, and look at every answer."""
        for gateway in GATEWAYS:
            self.hear_again(gateway)
        if self.house.executor is None:
            self.join()
        self.house.run()
        for _ in range(3):  # the first tells what is held, the second that it stands still
            for gateway in GATEWAYS:
                self.beat(gateway)
        self.check()
        for name in list(self.owners):
            self._check_whole(name)
            self.house.done(name, gateway=self.owners[name])
        core = self.house.core
        assert (core.num_running, core.num_waiting, core.num_swapped) == (0, 0, 0)
        assert core.usage().num_free == core.usage().num_blocks
        assert len(core.book) == 0

    def _check_whole(self, name):
        stream, answer = self._stream(name), self.answers[name]
        finished = stream.finished
        assert finished is not None, f"{name} never ended"
        assert finished.length == len(stream.tokens)
        if finished.reason is FinishReason.ERROR:
            assert name in self.may_fail, f"{name}: {finished.error}"
        elif finished.reason is FinishReason.LENGTH:
            most = self.house.core.book.get(name).max_tokens
            assert name in self.may_fail or finished.length == most
            if most == 0:
                assert stream.prompt_logprobs == self.scores[name]
                self.happened["only scored"] += bool(self.scores[name])
        elif finished.stop_token_id is not None:
            assert tuple(stream.tokens) == answer
            assert answer[-1] == finished.stop_token_id
        else:
            assert name in self.over, f"{name} stopped for no reason"

    # ------------------------------------------------------------------ small things

    def _stream(self, name):
        return self.house.stream(name, self.owners[name])

    def _is_deaf(self, name):
        return self.house.gateways[self.owners[name].encode()].is_deaf

    def _pick(self, which):
        names = list(self.owners)
        return names[which % len(names)] if names else None

    def _forget(self, name):
        del self.owners[name], self.answers[name], self.logprobs[name], self.scores[name]

    def _drop_refused(self):
        for name in list(self.owners):
            if self._stream(name).refused:
                self._forget(name)

    def _names_of(self, sequence_ids):
        return {
            request.request_id
            for request in self.house.core.book
            for sequence in request.sequences
            if sequence.sequence_id in sequence_ids
        }

    def _so_far(self, name, finish=None):
        stream = self._stream(name)
        return (GeneratedSequence(tuple(stream.tokens), finish, tuple(stream.logprobs)),)

    def _resubmit(self, name, generated, *, resubmitted=False):
        submit = self.house.submits[name]
        stream = self._stream(name)
        ended = stream.finished
        self.house.submit(
            name, submit.prompt, gateway=self.owners[name], sampling=submit.sampling,
            extra={
                "generated": generated,
                "prompt_logprobs": stream.prompt_logprobs,
                "resubmitted": resubmitted,
            },
        )  # fmt: skip
        if stream.finished is None:
            stream.finished = ended


def random_walk(seed, num_moves, **house):
    """A walk that needs no hypothesis: the same seed is the same walk. Returns its walker."""
    dice = Random(seed)
    walker = Walker(**house)
    for _ in range(num_moves):
        gateway, which = dice.choice(GATEWAYS), dice.randrange(100)
        move = dice.choices(list(_MOVES), weights=[weight for weight, _ in _MOVES.values()])[0]
        _MOVES[move][1](walker, dice, gateway, which)
        walker.check()
    return walker


def _submit(walker, dice, gateway, _):
    params = {
        "seed": dice.randrange(3),
        "ignore_eos": dice.random() < 0.5,
        "min_tokens": dice.choice((0, 0, 2)),  # above max_tokens 0: refused
        "stop_token_ids": dice.choice(((), (3,), (5, 9))),
        "logprobs": dice.choice((None, None, 0, 2)),
        "prompt_logprobs": dice.choice((None, None, 0, 3)),
        "draw": dice.choice((DrawParams(), DrawParams(), PENALTY)),
    }
    age_s = dice.choice((0.0, 0.0, 0.0, 0.5))
    most = dice.choice((None, 0, 3, 6, 14))
    walker.submit(dice.randrange(1, 16), most, gateway, params, age_s)


_MOVES = {
    "submit": (14, _submit),
    "step": (60, lambda walker, dice, *_: walker.step(dice.randrange(1, 4))),
    "cancel": (3, lambda walker, dice, gateway, which: walker.cancel(which)),
    "stop string": (2, lambda walker, dice, gateway, which: walker.stop_string(which)),
    "done": (8, lambda walker, dice, gateway, which: walker.done(which)),
    "attach": (3, lambda walker, dice, gateway, which: walker.attach(which, gateway)),
    "again": (2, lambda walker, dice, gateway, which: walker.submit_again(which)),
    "beat": (8, lambda walker, dice, gateway, _: walker.beat(gateway)),
    "deaf": (1, lambda walker, dice, gateway, _: walker.turn_deaf(gateway)),
    "hear": (3, lambda walker, dice, gateway, _: walker.hear_again(gateway)),
    "row error": (1, lambda walker, dice, gateway, which: walker.step_with_row_error(which)),
    "late": (2, lambda walker, dice, _, which: walker.late_result(which, dice.random() < 0.7)),
    "no executor": (2, lambda walker, *_: walker.lose_executor()),
    "executor": (4, lambda walker, *_: walker.house.executor or walker.join()),
    "no gateway": (0.5, lambda walker, dice, gateway, _: walker.lose_gateway(gateway)),
    "refused step": (0.5, lambda walker, *_: walker.refuse_step()),
    "restart": (0.5, lambda walker, *_: walker.restart()),
    "tick": (3, lambda walker, *_: walker.tick(0.1)),
}
