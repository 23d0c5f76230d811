"""Random plans on the toy, against a pool that is a dictionary and a sampler that sorts.

The walk plays a careless but lawful scheduler: sequences come, grow by chunks of any size, fork and
share blocks, copy on write, swap out and in, and go, with blocks reused at once. Every token drawn
must be the one that the plain model draws from what the plain pool holds. The seed in a
test's name makes the walk.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.messages import PREVIOUS, Move, Score, StepFailed
from shared.sampling import DrawParams
from tests.executor.plain_sampler import is_right
from tests.executor.plain_toy import PlainPool, toy_logits
from tests.executor.plans import GREEDY, plan, row, sample

NUM_GPU, NUM_CPU, LONGEST = 12, 8, 24
PARAMS = [
    GREEDY, DrawParams(temperature=2.0), DrawParams(top_p=0.7), DrawParams(top_k=5),
    DrawParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    DrawParams(repetition_penalty=1.5, logit_bias=((65, 50.0), (66, 49.0)), bad_words=((65, 65),)),
    DrawParams(allowed_token_ids=(3, 65, 66, 500), bad_words=((66, 65, 66), (3,)), top_p=0.9),
]  # fmt: skip


@dataclass
class Grown:
    """A sequence: its tokens, how many of them lie in the pool, and where."""

    tokens: list
    params: DrawParams
    seed: int
    computed: int = 0
    table: list = field(default_factory=list)
    is_swapped: bool = False
    drawn_at: int | None = None  # the step that drew its last token
    num_prompt: int = 0

    def __post_init__(self):
        self.num_prompt = len(self.tokens)


class Walk:
    """The scheduler's part, with the reference beside it."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.size = self.dice.choice([1, 3, 4, 16])
        self.pools = KVPools(ToyModel(), NUM_GPU, self.size, NUM_CPU)
        self.interpreter = Interpreter(ToyModel(), self.pools, max_model_len=LONGEST)
        self.gpu, self.cpu = PlainPool(self.size), PlainPool(self.size)
        self.names = itertools.count(1)
        self.step_id = 0
        self.sequences = {}
        self.swap_out, self.swap_in, self.blocked = [], [], set()
        self.seen = Counter()

    # ------------------------------------------------------------- what the scheduler knows

    def uses(self, *, swapped):
        return Counter(
            block
            for sequence in self.sequences.values()
            if sequence.is_swapped == swapped
            for block in sequence.table
        )

    def free(self, *, swapped=False):
        """Blocks that may be handed out: a block freed while planning may not."""
        used = self.uses(swapped=swapped)
        pool = range(NUM_CPU if swapped else NUM_GPU)
        return [b for b in pool if not used[b] and (swapped, b) not in self.blocked]

    def some(self, *, swapped=False):
        """Any sequence of a kind, and its name; (None, None) if there is none."""
        found = [(n, s) for n, s in self.sequences.items() if s.is_swapped == swapped]
        return self.dice.choice(found) if found else (None, None)

    # ------------------------------------------------------------- what happens

    def come(self):
        prompt = [self.dice.randrange(512) for _ in range(self.dice.randint(1, 12))]
        if len(self.sequences) < 8:
            self.sequences[next(self.names)] = Grown(
                prompt, self.dice.choice(PARAMS), self.dice.randrange(-(2**63), 2**63)
            )

    def go(self):
        name, sequence = self.some()
        if sequence and (len(sequence.tokens) > LONGEST // 2 or not self.free()):
            del self.sequences[name]
            self.blocked |= {(False, block) for block in sequence.table}

    def fork(self):
        _, parent = self.some()
        if parent and len(self.sequences) < 8:
            self.sequences[next(self.names)] = Grown(
                list(parent.tokens), parent.params, self.dice.randrange(100),
                parent.computed, list(parent.table),
            )  # fmt: skip

    def give_way(self, sequence):
        """To be recomputed, from the first token on."""
        self.blocked |= {(False, block) for block in sequence.table}
        sequence.table, sequence.computed = [], 0

    def leave_for_the_cpu_pool(self):
        _, sequence = self.some()
        free = self.free(swapped=True)
        arriving = {move.destination for move in self.swap_in}
        if sequence and len(free) >= len(sequence.table) and not arriving & {*sequence.table}:
            self.blocked |= {(False, block) for block in sequence.table}
            self.swap_out += self.moved(sequence, free)

    def return_to_the_gpu_pool(self):
        _, sequence = self.some(swapped=True)
        free = self.free()
        leaving = {move.destination for move in self.swap_out}
        if sequence and len(free) >= len(sequence.table) and not leaving & {*sequence.table}:
            self.blocked |= {(True, block) for block in sequence.table}
            self.swap_in += self.moved(sequence, free)

    def moved(self, sequence, free):
        """Give it new blocks of the other pool; the moves that this takes."""
        moves = [Move(*pair) for pair in zip(sequence.table, free, strict=False)]
        sequence.table = [move.destination for move in moves]
        sequence.is_swapped = not sequence.is_swapped
        return moves

    def step(self):
        copies, rows, members = [], [], {}
        running = [(n, s) for n, s in self.sequences.items() if not s.is_swapped]
        self.dice.shuffle(running)
        for name, sequence in running[: self.dice.randint(1, 8)]:
            chunk = self.dice.choice([1, 2, 5, LONGEST])
            if self.dice.random() < 0.15:
                self.give_way(sequence)
                chunk = self.dice.choice([chunk, LONGEST])
            count = min(chunk, self.missing(sequence))
            if count and self.grow(sequence, count, copies):
                rows.append(self.row(name, sequence, count))
                members[name] = (sequence, count)
        self.step_id += 1
        result = self.interpreter.run(
            plan(*rows, step_id=self.step_id, copies=tuple(copies),
                 swap_out=tuple(self.swap_out), swap_in=tuple(self.swap_in))
        )  # fmt: skip
        assert not isinstance(result, StepFailed), result.message
        assert not result.row_errors
        for move in self.swap_out:
            self.cpu.copy_from(self.gpu, *(move.source, move.destination))
        for move in self.swap_in:
            self.gpu.copy_from(self.cpu, *(move.source, move.destination))
        for move in copies:
            self.gpu.copy_from(self.gpu, *(move.source, move.destination))
        self.seen += Counter(
            rows=len(rows), copies=len(copies), out=len(self.swap_out), back=len(self.swap_in)
        )
        self.swap_out, self.swap_in, self.blocked = [], [], set()
        for sequence, count in members.values():
            for position in range(sequence.computed, sequence.computed + count):
                self.gpu.write(sequence.table, position, sequence.tokens[position])
            sequence.computed += count
        self.check_scores(rows, members, result)
        self.check_draws(rows, members, result)

    def a_bad_plan(self):
        block = self.dice.choice([-1, NUM_GPU, 2**31])
        bad = row((1,), 0, (block,), sequence_id=next(self.names))
        result = self.interpreter.run(plan(bad, step_id=self.step_id + 1, copies=(Move(0, 1),)))
        assert isinstance(result, StepFailed)

    # ------------------------------------------------------------- the parts of a step

    def missing(self, sequence):
        """Tokens that are known and not in the pool."""
        return len(sequence.tokens) - sequence.computed

    def grow(self, sequence, count, copies):
        """Blocks for `count` more tokens, the shared last one copied; False if there are none."""
        free, uses = self.free(), self.uses(swapped=False)
        first = sequence.computed // self.size
        needed = -(-(sequence.computed + count) // self.size)
        table = list(sequence.table)
        if sequence.computed + count > LONGEST:
            return False
        if first < len(table) and uses[table[first]] > 1:
            if not free or table[first] in {m.destination for m in copies}:
                return False
            copies_one = Move(table[first], free.pop(0))
            table[first] = copies_one.destination
        else:
            copies_one = None
        if needed - len(table) > len(free):
            return False
        table += free[: max(0, needed - len(table))]
        sequence.table = table
        copies += [copies_one] if copies_one else []
        return True

    def row(self, name, sequence, count):
        end = sequence.computed + count
        ids = sequence.tokens[sequence.computed : end]
        is_whole = end == len(sequence.tokens)
        if is_whole and sequence.drawn_at == self.step_id and self.dice.random() < 0.7:
            ids = [*ids[:-1], PREVIOUS]
            self.seen["previous after more" if len(ids) > 1 else "previous"] += 1
        draws = [self.sample(name, sequence, ids)] if is_whole else []
        score = None
        if self.dice.random() < 0.3:  # all but its last token: what comes after is not known yet
            score = Score(sequence.computed, tuple(sequence.tokens[sequence.computed + 1 : end]), 2)
        return row(
            ids, sequence.computed, sequence.table, sequence_id=name, samples=draws,
            score=score if score and score.token_ids else None,
        )  # fmt: skip

    def sample(self, name, sequence, ids):
        """A sample of its next token; with a history, if that must be told."""
        told = {"num_top": self.dice.choice([None, 0, 3])}
        if sequence.params.needs_history:
            known = sequence.tokens[: len(sequence.tokens) - len(ids)]
            told |= {"history": (*known, *ids), "num_prompt": sequence.num_prompt}
        return sample(name, sequence.params, seed=sequence.seed, index=name, **told)

    def check_draws(self, rows, members, result):
        drawn = {sampled.sequence_id: sampled.token_id for sampled in result.sampled}
        logprobs = {sampled.sequence_id: sampled.logprobs for sampled in result.sampled}
        asked = {s.sequence_id: s for r in rows for s in r.samples}
        assert set(drawn) == set(asked)
        for name, token in drawn.items():
            sequence, _ = members[name]
            context = self.gpu.context(sequence.table, sequence.computed)
            assert context == [(t, p) for p, t in enumerate(sequence.tokens)]  # the walk is lawful
            told = asked[name]
            if told.history:  # and so is what it tells, PREVIOUS resolved
                told = replace(told, history=tuple(sequence.tokens))
            logits = toy_logits(context)
            assert is_right(token, logits, told, len(sequence.tokens))
            assert (logprobs[name] is None) == (told.num_top is None)
            if logprobs[name] is not None:
                self.check_logprobs(logprobs[name], logits, token, told.num_top)
            sequence.tokens.append(token)
            sequence.drawn_at = self.step_id

    def check_scores(self, rows, members, result):
        asked = {r.sequence_id: r.score for r in rows if r.score}
        assert {made.sequence_id: made.first_position for made in result.scored} == {
            name: score.first_position for name, score in asked.items()
        }
        for made in result.scored:
            sequence, score = members[made.sequence_id][0], asked[made.sequence_id]
            for offset, (told, token) in enumerate(
                zip(made.logprobs, score.token_ids, strict=True)
            ):
                length = score.first_position + offset + 1
                context = self.gpu.context(sequence.table, length)
                self.check_logprobs(told, toy_logits(context), token, score.num_top)
        self.seen["scored"] += len(result.scored)

    def check_logprobs(self, told, logits, token, num_top):
        wanted = torch.from_numpy(logits).double().log_softmax(-1)
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        assert told.chosen == pytest.approx(float(wanted[token]), abs=1e-5)
        assert told.rank == 1 + order.index(token)
        assert told.top_ids == tuple(order[:num_top])
        assert told.top == pytest.approx(wanted[order[:num_top]].tolist(), abs=1e-5)


ACTIONS = {
    Walk.step: 12, Walk.come: 4, Walk.go: 2, Walk.fork: 5,
    Walk.leave_for_the_cpu_pool: 3, Walk.return_to_the_gpu_pool: 3, Walk.a_bad_plan: 1,
}  # fmt: skip


@pytest.mark.parametrize("first_seed", [0, 20])
def test_walks_draw_what_the_plain_model_draws(first_seed):
    seen = Counter()
    for seed in range(first_seed, first_seed + 20):
        walk = Walk(seed)
        for action in walk.dice.choices([*ACTIONS], weights=[*ACTIONS.values()], k=150):
            action(walk)
        seen += walk.seen
    print(f"seeds {first_seed}..: {dict(seen)}")
    whats = ("rows", "copies", "out", "back", "previous", "previous after more", "scored")
    assert min(seen[what] for what in whats) > 5
