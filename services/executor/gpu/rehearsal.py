"""Plans before the first one: they have everything compiled, and tell what giving way costs.

They go the way of all plans, through the runner and over the pools that will serve: on a GPU no
other way costs the same, and there is no memory left to try it in. Nobody has a block yet.
"""

import time
from collections.abc import Sequence
from typing import Final

from services.executor.batch import flatten
from services.executor.costs import (
    ALL_S,
    LONGEST_PROMPT,
    MOST_BLOCKS,
    MOVES_S,
    Clock,
    move_rate,
    prefill_rate,
)
from services.executor.kv_pool import KVPools
from services.executor.runner import Launched, Runner
from shared.geometry import blocks_in
from shared.ids import BlockId, Boot, SequenceId
from shared.messages import PREVIOUS, Costs, Move, Row, Sample, StepPlan
from shared.sampling import DrawParams

WARM_TOKENS: Final = 17
"""Of a prompt that has everything compiled."""
_NAME: Final = SequenceId(0)
_GREEDY: Final = DrawParams(temperature=0.0)


class Rehearsal:
    """A runner at work for nobody, before it is anybody's.

    Args:
        runner: of the pools.
        pools: no block of which is anybody's.
        vocab_size: the model's.
        max_model_len: the longest sequence; the pool holds one.
    """

    def __init__(self, runner: Runner, pools: KVPools, vocab_size: int, max_model_len: int) -> None:
        self._runner = runner
        self._pools = pools
        self._vocab_size = vocab_size
        self._longest = max_model_len
        self._num_steps = 0

    def warm_up(self, num_tokens: int = WARM_TOKENS) -> None:
        """A prompt of so many tokens or fewer, its next token, a copy, a draw, and a swap each way.

        What is compiled, loaded or woken by the first of its kind is afterwards.
        """
        count = max(1, min(num_tokens, self._longest - 1))
        prompt = self._run((self._row(self._prompt(count)),))
        if count < self._longest:
            copies = (_move(0, 1),) if self._pools.num_gpu_blocks > 1 else ()
            self._run((self._row((PREVIOUS,), count),), prompt, copies=copies)
        if self._pools.num_cpu_blocks:
            self.swap_out((_move(0, 0),))
            self.swap_in((_move(0, 0),))

    def costs(self, block_bytes: int, clock: Clock = time.perf_counter) -> Costs:
        """What moves and prompts take, each whole, as a plan's: once they are warm."""
        began = clock()
        pools = self._pools
        num_blocks = min(pools.num_gpu_blocks, pools.num_cpu_blocks, MOST_BLOCKS)
        copy_rate = 0.0
        if num_blocks:
            copy_rate = move_rate(
                *(self.swap_out, self.swap_in, num_blocks, block_bytes, clock),
                until=began + MOVES_S,
            )
        longest = min(LONGEST_PROMPT, self._longest)
        return Costs(
            block_bytes, copy_rate, prefill_rate(self.compute, longest, clock, until=began + ALL_S)
        )

    def swap_out(self, moves: Sequence[Move]) -> None:
        """Blocks of the GPU's pool to main memory, as one plan."""
        self._run((), swap_out=moves)

    def swap_in(self, moves: Sequence[Move]) -> None:
        """The way back."""
        self._run((), swap_in=moves)

    def compute(self, num_tokens: int) -> None:
        """A prompt, and its first token."""
        self._run((self._row(self._prompt(num_tokens)),))

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(i % self._vocab_size for i in range(num_tokens))

    def _row(self, token_ids: tuple[int, ...], first_position: int = 0) -> Row:
        num_blocks = blocks_in(first_position + len(token_ids), self._pools.block_size)
        table = tuple(BlockId(block) for block in range(num_blocks))
        return Row(_NAME, token_ids, first_position, table, (Sample(_NAME, 0, 0, _GREEDY),))

    def _run(
        self,
        rows: tuple[Row, ...],
        before: Launched | None = None,
        *,
        swap_out: Sequence[Move] = (),
        swap_in: Sequence[Move] = (),
        copies: Sequence[Move] = (),
    ) -> Launched:
        self._num_steps += 1
        plan = StepPlan(
            Boot(0),
            self._num_steps,
            rows,
            swap_out=tuple(swap_out),
            swap_in=tuple(swap_in),
            copies=tuple(copies),
        )
        launched = self._runner.launch(plan, flatten(rows, self._pools.block_size), before)
        launched.finish()
        return launched


def _move(source: int, destination: int) -> Move:
    return Move(BlockId(source), BlockId(destination))
