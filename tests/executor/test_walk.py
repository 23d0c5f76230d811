"""Random plans on the toy, against a pool that is a dictionary and a sampler that sorts.

The walk plays a careless but lawful scheduler: sequences come, grow by chunks of any size, fork and
share blocks, copy on write, swap out and in, and go, with blocks reused at once. Every token drawn
must be the one that the plain model draws from what the plain pool holds.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.messages import PREVIOUS, Move, StepFailed
from shared.sampling import DrawParams
from tests.executor.plain_sampler import is_right
from tests.executor.plain_toy import PlainPool, toy_logits
from tests.executor.plans import GREEDY, plan, row, sample

NUM_GPU, NUM_CPU, LONGEST = 12, 8, 24
PARAMS = [GREEDY, DrawParams(temperature=2.0), DrawParams(top_p=0.7), DrawParams(top_k=5)]


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


class Walk(RuleBasedStateMachine):
    """The scheduler's part, with the reference beside it."""

    @initialize(block_size=st.sampled_from([1, 3, 4, 16]))
    def begin(self, block_size):
        model = ToyModel()
        self.size = block_size
        self.interpreter = Interpreter(
            model, KVPools(model, NUM_GPU, block_size, NUM_CPU), max_model_len=LONGEST
        )
        self.gpu, self.cpu = PlainPool(block_size), PlainPool(block_size)
        self.names = itertools.count(1)
        self.step_id = 0
        self.sequences = {}
        self.swap_out, self.swap_in, self.blocked = [], [], set()

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

    def some(self, choice, *, swapped=False):
        names = [name for name, s in self.sequences.items() if s.is_swapped == swapped]
        return self.sequences[names[choice % len(names)]] if names else None

    # ------------------------------------------------------------- what happens

    @rule(
        prompt=st.lists(st.integers(0, 511), min_size=1, max_size=12),
        params=st.sampled_from(PARAMS),
        seed=st.integers(-(2**63), 2**63 - 1),
    )
    def come(self, prompt, params, seed):
        self.sequences[next(self.names)] = Grown(list(prompt), params, seed)

    @rule(choice=st.integers(0, 20))
    def go(self, choice):
        sequence = self.some(choice)
        if sequence:
            name = next(n for n, s in self.sequences.items() if s is sequence)
            del self.sequences[name]
            self.blocked |= {(False, block) for block in sequence.table}

    @rule(choice=st.integers(0, 20), seed=st.integers(0, 100))
    def fork(self, choice, seed):
        parent = self.some(choice)
        if parent:
            self.sequences[next(self.names)] = Grown(
                list(parent.tokens), parent.params, seed, parent.computed, list(parent.table)
            )

    @rule(choice=st.integers(0, 20))
    def leave_for_the_cpu_pool(self, choice):
        sequence, free = self.some(choice), self.free(swapped=True)
        arriving = {move.destination for move in self.swap_in}
        if sequence and len(free) >= len(sequence.table) and not arriving & {*sequence.table}:
            self.blocked |= {(False, block) for block in sequence.table}
            moves = list(zip(sequence.table, free, strict=False))
            self.swap_out += [Move(*move) for move in moves]
            sequence.table = [destination for _, destination in moves]
            sequence.is_swapped = True

    @rule(choice=st.integers(0, 20))
    def return_to_the_gpu_pool(self, choice):
        sequence, free = self.some(choice, swapped=True), self.free()
        leaving = {move.destination for move in self.swap_out}
        if sequence and len(free) >= len(sequence.table) and not leaving & {*sequence.table}:
            self.blocked |= {(True, block) for block in sequence.table}
            moves = list(zip(sequence.table, free, strict=False))
            self.swap_in += [Move(*move) for move in moves]
            sequence.table = [destination for _, destination in moves]
            sequence.is_swapped = False

    @rule(chunks=st.lists(st.integers(0, 9), min_size=1, max_size=8), ahead=st.booleans())
    def step(self, chunks, ahead):
        copies, rows, members = [], [], {}
        running = [(n, s) for n, s in self.sequences.items() if not s.is_swapped]
        for (name, sequence), chunk in zip(running, chunks, strict=False):
            count = min(chunk, len(sequence.tokens) - sequence.computed)
            if count and self.grow(sequence, count, copies):
                rows.append(self.row(name, sequence, count, ahead))
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
        self.swap_out, self.swap_in, self.blocked = [], [], set()
        for sequence, count in members.values():
            for position in range(sequence.computed, sequence.computed + count):
                self.gpu.write(sequence.table, position, sequence.tokens[position])
            sequence.computed += count
        self.check_draws(rows, members, result)

    @precondition(lambda self: self.sequences)
    @rule(block=st.sampled_from([-1, NUM_GPU, 2**31]))
    def a_bad_plan_in_between(self, block):
        bad = row((1,), 0, (block,), sequence_id=next(self.names))
        result = self.interpreter.run(plan(bad, step_id=self.step_id + 1, copies=(Move(0, 1),)))
        assert isinstance(result, StepFailed)

    # ------------------------------------------------------------- the parts of a step

    def grow(self, sequence, count, copies):
        """Blocks for `count` more tokens, the shared last one copied; False if there are none."""
        free, uses = self.free(), self.uses(swapped=False)
        first = sequence.computed // self.size
        needed = -(-(sequence.computed + count) // self.size)
        table = list(sequence.table)
        if needed * self.size > 2 * LONGEST or sequence.computed + count > LONGEST:
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

    def row(self, name, sequence, count, ahead):
        end = sequence.computed + count
        ids = sequence.tokens[sequence.computed : end]
        is_whole = end == len(sequence.tokens)
        if ahead and is_whole and sequence.drawn_at == self.step_id:
            ids = [*ids[:-1], PREVIOUS]
        draws = [sample(name, sequence.params, seed=sequence.seed, index=name)] if is_whole else []
        return row(ids, sequence.computed, sequence.table, sequence_id=name, samples=draws)

    def check_draws(self, rows, members, result):
        drawn = {sampled.sequence_id: sampled.token_id for sampled in result.sampled}
        asked = {s.sequence_id: s for r in rows for s in r.samples}
        assert set(drawn) == set(asked)
        for name, token in drawn.items():
            sequence, _ = members[name]
            context = self.gpu.context(sequence.table, sequence.computed)
            assert context == [(t, p) for p, t in enumerate(sequence.tokens)]  # the walk is lawful
            assert is_right(token, toy_logits(context), asked[name], len(sequence.tokens))
            sequence.tokens.append(token)
            sequence.drawn_at = self.step_id


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWalk = pytest.mark.timeout(120)(Walk.TestCase)
