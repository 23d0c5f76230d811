"""Everything that can happen to a scheduler, as moves that a random walk can choose from.

After each move the laws hold (the house sees to it) and every answer so far is the beginning of the
answer the request would get alone. `end` brings all to its end and checks the answers whole.
"""

from collections import Counter
from dataclasses import replace
from random import Random

from services.scheduler.core.commands import Reply
from services.scheduler.core.events import StepFinished
from shared.errors import ErrorCode
from shared.ids import Boot
from shared.messages import GeneratedSequence, PreemptionMode
from shared.sampling import NO_DRAW, DrawParams, EarlyStopping, FinishReason, SamplingParams
from tests.scheduler.core.house import House
from tests.scheduler.core.toys import VOCAB, solo, solo_logprobs, solo_scores

GATEWAYS = "gh"
PENALTY = DrawParams(presence_penalty=0.5)
MOST_LIVE = 12
FAMILIES = [tuple((first + at * 7) % (VOCAB - 1) + 1 for at in range(40)) for first in (0, 11)]


class Walker:
    """A house, and what a plain memory of the walk knows about each request."""

    def __init__(self, widths=(1,), beams=0.0, priorities=(0,), deadlines=(None,), **house):
        """`widths`, ... are the n, the priorities and so on of what a random walk submits; `beams`
        is the share of beam searches."""
        self.house = House(**house)
        self.settings, self.widths, self.beams = house, widths, beams
        self.priorities, self.deadlines = priorities, deadlines
        self.births = {}
        self.owners = {}
        self.answers, self.logprobs, self.scores = {}, {}, {}
        self.pinned = {}
        self.away = set()
        """Those of the requests that nobody reads now."""
        self.may_fail = set()
        self.over = set()
        self.count = 0
        self.seen = {}
        self.happened = Counter()
        self.seen_plans, self.searched = 0, set()

    # ------------------------------------------------------------------ moves

    def submit(
        self, prompt, max_tokens, gateway, params, age_s=0.0, family=None, tenant=0, **extra
    ):  # fmt: skip
        """`params`: keyword arguments of SamplingParams beside max_tokens; `extra`: of Submit.

        Prompts of one family begin alike, for all but their last two tokens.
        """
        if len(self.owners) >= MOST_LIVE:
            return
        self.count += 1
        name = f"{self.count:03d}"
        if params.get("use_beam_search") and max_tokens is None:
            max_tokens = 7  # how many fit decides which texts are best
        house, sampling = self.house, SamplingParams(max_tokens=max_tokens, **params)
        self.owners[name] = gateway
        ids = tuple((self.count * 5 + at * at) % (VOCAB - 1) + 1 for at in range(prompt))
        if family is not None and prompt > 2:
            ids = FAMILIES[family][: prompt - 2] + ids[:2]
        most = house.max_model_len - prompt if max_tokens is None else max_tokens
        most = min(most, 4 * house.block_size * house.num_blocks)
        if sampling.use_beam_search and not most:
            answers = [()] * sampling.n  # refused
        else:
            answers = [solo(ids, sampling, most, index)[0] for index in range(sampling.n)]
        self.answers[name] = answers
        self.logprobs[name] = [solo_logprobs(ids, sampling, answer) for answer in answers]
        self.scores[name] = solo_scores(ids, sampling)
        house.submit(
            name, ids, gateway=gateway, sampling=sampling, age_s=age_s,
            context=b"c" * (self.count % 3), key_hash=bytes(tenant),
            extra={"cache_salt": "s" * tenant, **extra},
        )  # fmt: skip
        self.births[name] = house.now - age_s
        if refusal := self._stream(name).refused:
            self._forget(name)
            self.happened[str(refusal.code)] += 1

    def pin(self, num_tokens, gateway, family, tenant):
        """Pin the beginning of a family's prompts; at most three at a time."""
        if len(self.pinned) < 3:
            self.count += 1
            name = f"P{self.count:03d}"
            self.pinned[name] = (FAMILIES[family][:num_tokens], gateway, tenant)
            self._pin_again(name)
            self._drop_refused_pins()

    def unpin(self, which, gateway):
        if self.pinned:
            name = sorted(self.pinned)[which % len(self.pinned)]
            _, _, tenant = self.pinned.pop(name)
            self.house.unpin(name, gateway=gateway, key_hash=bytes(tenant))
            self.happened["unpinned"] += 1

    def _pin_again(self, name):
        tokens, gateway, tenant = self.pinned[name]
        self.house.pin(
            name, tokens, gateway=gateway, key_hash=bytes(tenant), cache_salt="s" * tenant
        )

    def _drop_refused_pins(self):
        """Forget those that are here no more, for whatever reason."""
        here = {prefix.pin.pin_id for prefix in self.house.core.book.pins}
        for name in self.pinned.keys() - here if self.house.executor is not None else ():
            del self.pinned[name]
            self.happened["pin refused or dropped"] += 1

    def step(self, times=1):
        for _ in range(times):
            if self.house.in_flight:
                self.house.step()
                self.happened["step"] += 1

    def step_with_row_error(self, which):
        if not self.house.in_flight:
            return
        rows = self.house.in_flight[0].rows
        if not rows or self.house.executor.lacks(self.house.in_flight[0]):
            return
        sequence_id = rows[which % len(rows)].sequence_id
        self.may_fail.update(self._names_of({sequence_id}))
        self.house.step(failing_rows={sequence_id})
        self.happened["row error"] += 1

    def late_result(self, which, is_ours):
        """A result nobody waits for: of a step long over, or of another scheduler's plan."""
        results, plans = self.house.results, self.house.in_flight
        if is_ours and results:
            result = results[which % len(results)]
        elif not is_ours and plans and not self.house.executor.lacks(plans[0]):
            result = replace(self.house.executor.run(plans[0]), boot=Boot(1))
        else:
            return
        before = self.house.core.counters.results_dropped
        commands = self.house.handle(StepFinished(self.house.later(), result))
        assert not any(isinstance(command, Reply) for command in commands)
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
            index = which % self.house.width(name)
            self.over.add((name, index))
            self.house.stop_string(name, self.owners[name], index)
            self.happened["stop string"] += 1

    def done(self, which):
        name = self._pick(which)
        if name and all(stream.finished for stream in self._streams(name)):
            self._check_whole(name)
            self.house.done(name, gateway=self.owners[name])
            self._forget(name)
            self.happened["done"] += 1

    def attach(self, which, gateway):
        name = self._pick(which, away=True)
        if name is None or self.house.executor is None or self.house.status(name) is None:
            return
        if self._is_deaf(name) or self.house.gateways[gateway.encode()].is_deaf:
            return
        if not self.house.submits[name].context:
            return
        held = self.house.stream(name, gateway)
        held.max_tokens = self._stream(name).max_tokens
        held.num_scores = self._stream(name).num_scores
        self.house.attach(name, gateway, self.house.submits[name].key_hash)
        self.owners[name] = gateway
        self.happened["back again" if name in self.away else "attach"] += 1
        self.away.discard(name)

    def detach(self, which):
        """The client leaves, and may come back."""
        if name := self._pick(which):
            self.house.detach(name, self.owners[name])
            self._goes_away(name)
            self.happened["detach"] += 1

    def submit_again(self, which):
        name = self._pick(which)
        if name:
            self._resubmit(name, self._so_far(name))
            self.happened["submit again"] += 1

    def beat(self, gateway):
        names = [
            name
            for name, owner in self.owners.items()
            if owner == gateway and name not in self.away
        ]
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
            self._goes_away(name)
        self.happened["gateway lost"] += 1

    def _goes_away(self, name):
        if self.house.submits[name].context and self.house.status(name) is not None:
            self.away.add(name)
        elif name not in self.away:
            self._forget(name)

    def lose_executor(self):
        if self.house.executor is not None:
            for request in self.house.core.book:
                if request.num_losses >= 2:
                    self.may_fail.add(request.request_id)
            for plan in self.house.in_flight:
                if not self.house.executor.lacks(plan):
                    self.house.results.append(self.house.executor.run(plan))
            self.house.lose_executor()
            self.happened["executor lost"] += 1

    def join(self, num_blocks=None):
        """Join a new executor; one with another number of blocks may end requests."""
        if num_blocks not in (None, self.house.num_blocks) or self.house.executor is not None:
            self.may_fail.update(self.owners)
        self._count()
        self.house.join(num_blocks)

    def restart(self):
        """The scheduler dies; its gateways submit what they hold to the next one."""
        self._count()
        for name in sorted(self.away):
            self._forget(name)
        self.seen_plans, self.searched = 0, set()
        old, self.house = self.house, House(**{**self.settings, "join": False})
        self.house.gateways, self.house.now = old.gateways, old.now
        self.house.submits, self.house.history = old.submits, old.history
        for gateway in self.house.gateways.values():
            gateway.is_deaf = False
        for name in self.pinned:
            self._pin_again(name)
        for name in self.owners:
            streams = self._streams(name)
            is_new = not any(stream.finished or stream.tokens for stream in streams)
            so_far = () if is_new else self._so_far(name, with_ends=True)
            self._resubmit(name, so_far, resubmitted=True)
        self.house.join(old.num_blocks)
        for name in self.owners:
            refusal = self._stream(name).refused
            assert refusal is None or refusal.code is not ErrorCode.QUEUE_FULL, refusal.message
        self._drop_refused()
        self.happened["restart"] += 1

    def tick(self, seconds):
        self._count()
        self.house.tick(seconds)
        for name in [name for name in sorted(self.away) if self.house.status(name) is None]:
            self._forget(name)
            self.happened["expired"] += 1
        for request in self.house.core.book:
            late = request.is_live and request.expires_at <= self.house.now
            assert not late, f"{request.request_id} goes on after its deadline"

    # ------------------------------------------------------------------ checks

    def check(self):
        """What must hold between any two moves."""
        self._drop_refused()
        self._drop_refused_pins()
        for name in self.owners:
            for index, stream in enumerate(self._streams(name)):
                held, answer = tuple(stream.tokens), self.answers[name][index]
                assert held == answer[: len(held)], f"{name}:{index} went astray"
                told = self.logprobs[name][index][: len(held)]
                assert tuple(stream.logprobs) == told, f"{name}: its logprobs went astray"
            stream, scores = self._stream(name), self.scores[name]
            held = stream.tokens
            assert stream.prompt_logprobs in ((), scores), f"{name}: its scores went astray"
            if held and scores:
                assert stream.prompt_logprobs, f"{name}: its scores were left out"
                self.happened["scored"] += 1

    def _count(self):
        """What this scheduler life has seen so far; a life that is over is counted in full."""
        counters, seen = self.house.core.counters, self.seen
        now = {
            "preemption": counters.preemptions.total(),
            "swap": counters.preemptions[PreemptionMode.SWAP],
            "recompute": counters.preemptions[PreemptionMode.RECOMPUTE],
            "swap in": counters.swap_in_blocks,
            "fallback": counters.swap_fallbacks,
            "copy on write": counters.cow_copies,
            "hit": counters.prefix_cache_hits,
            "pinned": counters.pins_taken,
            "pin hit": counters.pin_hits,
            "eviction": self.house.core.prefix_evictions,
            "deadline": counters.deadlines_passed,
        }
        self._count_beams()
        for what, times in now.items():
            self.happened[what] += max(0, times - seen.get(what, 0))
        self.seen = now

    def _count_beams(self):
        """What became of beam searches since this was last asked, as far as plans tell it."""
        plans, self.seen_plans = self.house.plans[self.seen_plans :], len(self.house.plans)
        for plan in plans:
            asks = [ask for row in plan.rows for ask in row.samples if ask.draw is None]
            self.searched.update(ask.sequence_id for ask in asks)
            self.happened["beam"] += len(asks)
            for told in plan.preemptions:
                if told.sequence_id in self.searched:
                    self.happened[f"beam {told.mode}"] += 1

    def end(self):
        """Mend everything, run to the end, and look at every answer."""
        for gateway in GATEWAYS:
            self.hear_again(gateway)
        if self.house.executor is None:
            self.join()
        self.house.run()
        while self.away:
            count = len(self.away)
            self.attach(list(self.owners).index(min(self.away)), "g")
            assert len(self.away) == count - 1
        for _ in range(3):  # the first tells what is held, the second that it stands still
            for gateway in GATEWAYS:
                self.beat(gateway)
        self.check()
        for name in list(self.owners):
            self._check_whole(name)
            self.house.done(name, gateway=self.owners[name])
        self._count()
        assert all(prefix.is_ready for prefix in self.house.core.book.pins)
        while self.pinned:
            self.unpin(0, "g")
        core = self.house.core
        assert (core.num_running, core.num_waiting, core.num_swapped) == (0, 0, 0)
        for usage in (core.usage(), core.cpu_usage()):
            assert usage.num_free + usage.num_cached == usage.num_blocks
        assert len(core.book) == 0

    def _check_whole(self, name):
        for index, stream in enumerate(self._streams(name)):
            self._check_one(name, index, stream)

    def _check_one(self, name, index, stream):
        answer, finished = self.answers[name][index], stream.finished
        assert finished is not None, f"{name} never ended"
        assert finished.length == len(stream.tokens)
        if finished.reason is FinishReason.ERROR:
            assert name in self.may_fail or self._is_late(name, finished), finished.error
        elif finished.reason is FinishReason.LENGTH:
            most = self.house.core.book.get(name).max_tokens
            is_default = self.house.submits[name].sampling.max_tokens is None
            if is_default and self.happened["restart"]:
                most = finished.length  # beside other prefixes than now, other numbers fitted
            assert name in self.may_fail or finished.length == most
            if most == 0:
                assert index or stream.prompt_logprobs == self.scores[name]
                self.happened["only scored"] += bool(self.scores[name])
        elif finished.stop_token_id is not None:
            assert tuple(stream.tokens) == answer
            assert answer[-1] == finished.stop_token_id
        else:
            assert (name, index) in self.over, f"{name}:{index} stopped for no reason"

    # ------------------------------------------------------------------ small things

    def _stream(self, name):
        return self.house.stream(name, self.owners[name])

    def _streams(self, name):
        return [
            self.house.stream(name, self.owners[name], index)
            for index in range(self.house.width(name))
        ]

    def _is_late(self, name, finished):
        """Whether it says that its deadline has passed, and that is true."""
        deadline_s = self.house.submits[name].deadline_s
        if finished.code is not ErrorCode.DEADLINE or deadline_s is None:
            return False
        return self.births[name] + deadline_s <= self.house.now + 1e-6

    def _is_deaf(self, name):
        return self.house.gateways[self.owners[name].encode()].is_deaf

    def _pick(self, which, *, away=False):
        names = [name for name in self.owners if away or name not in self.away]
        return names[which % len(names)] if names else None

    def _forget(self, name):
        self.away.discard(name)
        del self.owners[name], self.answers[name], self.logprobs[name], self.scores[name]

    def _drop_refused(self):
        for name in list(self.owners):
            if self._stream(name).refused:
                self._forget(name)

    def _names_of(self, sequence_ids):
        return {
            request.request_id
            for request in self.house.core.book
            for sequence in request.every_sequence
            if sequence.sequence_id in sequence_ids
        }

    def _so_far(self, name, *, with_ends=False):
        return tuple(
            GeneratedSequence(
                tuple(stream.tokens),
                stream.finished.reason if with_ends and stream.finished else None,
                tuple(stream.logprobs),
            )
            for stream in self._streams(name)
        )

    def _resubmit(self, name, generated, *, resubmitted=False):
        submit = self.house.submits[name]
        stream = self._stream(name)
        self.house.submit(
            name, submit.prompt, gateway=self.owners[name], sampling=submit.sampling,
            age_s=self.house.now - self.births[name],
            extra={
                "generated": generated,
                "prompt_logprobs": stream.prompt_logprobs,
                "resubmitted": resubmitted,
                "context": submit.context,
                "key_hash": submit.key_hash,
                "cache_salt": submit.cache_salt,
                "priority": submit.priority,
                "deadline_s": submit.deadline_s,
            },
        )  # fmt: skip


def as_beams(length_penalty, early_stopping):
    """What a wish says more to be searched with beams."""
    return {
        "use_beam_search": True,
        "draw": NO_DRAW,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }


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
    params["n"] = dice.choice(walker.widths)
    if walker.beams and dice.random() < walker.beams:
        params |= as_beams(dice.choice((-1.0, 0.0, 1.0, 2.0)), dice.choice(list(EarlyStopping)))
    age_s = dice.choice((0.0, 0.0, 0.0, 0.5))
    most = dice.choice((None, 0, 3, 6, 14))
    family, tenant = dice.choice((None, 0, 1)), dice.choice((0, 0, 1))
    walker.submit(
        dice.randrange(1, 16), most, gateway, params, age_s, family, tenant,
        priority=_any_of(dice, walker.priorities), deadline_s=_any_of(dice, walker.deadlines),
    )  # fmt: skip


def _any_of(dice, several):
    """One of these; where there is only one, no throw is spent on it."""
    return dice.choice(several) if len(several) > 1 else several[0]


def _pin(walker, dice, gateway, _):
    walker.pin(dice.randrange(1, 14), gateway, dice.choice((0, 1)), dice.choice((0, 0, 1)))


_MOVES = {
    "submit": (14, _submit),
    "step": (60, lambda walker, dice, *_: walker.step(dice.randrange(1, 4))),
    "cancel": (3, lambda walker, dice, gateway, which: walker.cancel(which)),
    "stop string": (2, lambda walker, dice, gateway, which: walker.stop_string(which)),
    "done": (8, lambda walker, dice, gateway, which: walker.done(which)),
    "attach": (3, lambda walker, dice, gateway, which: walker.attach(which, gateway)),
    "detach": (1, lambda walker, dice, gateway, which: walker.detach(which)),
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
    "pin": (3, _pin),
    "unpin": (1, lambda walker, dice, gateway, which: walker.unpin(which, gateway)),
    "tick": (3, lambda walker, *_: walker.tick(0.1)),
}
