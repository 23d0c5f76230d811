"""Teacher forcing through the paged cache: known tokens in, the logits of every position out."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.interface import PackedBatch
from services.executor.model.interface import DecoderModel
from shared.geometry import blocks_in
from tests.kernels.batches import poison


class Teacher:
    """Runs sequences together, in chunks of random size, through shuffled block tables."""

    def __init__(
        self, model: DecoderModel, prompts: Sequence[Sequence[int]], block_size: int, seed: int = 0
    ) -> None:
        self._model = model
        self._prompts = [list(prompt) for prompt in prompts]
        self._block_size = block_size
        self._random = torch.Generator().manual_seed(seed)
        counts = [blocks_in(len(prompt) + 64, block_size) for prompt in prompts]
        free = torch.randperm(sum(counts), generator=self._random).int()
        self._tables = torch.zeros(len(prompts), max(counts), dtype=torch.int32)
        for row, table in enumerate(torch.split(free, counts)):
            self._tables[row, : len(table)] = table
        self._pool = model.allocate_pool(sum(counts), block_size)
        poison(self._pool)
        self._computed = [0] * len(prompts)

    def logits(self, decoded: int, largest_chunk: int = 40) -> Iterator[tuple[int, int, Tensor]]:
        """(prompt, position, its logits) of every position; the last `decoded` come one by one."""
        while pending := [
            row for row, prompt in enumerate(self._prompts) if self._computed[row] < len(prompt)
        ]:
            counts = [self._next_count(row, decoded, largest_chunk) for row in pending]
            answers = self.step(pending, counts)
            for row, count, answer in zip(
                pending, counts, torch.split(answers, counts), strict=True
            ):
                for offset in range(count):
                    yield row, self._computed[row] - count + offset, answer[offset]

    def _next_count(self, row: int, decoded: int, largest_chunk: int) -> int:
        left = len(self._prompts[row]) - self._computed[row] - decoded
        chunk = int(torch.randint(1, largest_chunk + 1, (), generator=self._random))
        return max(1, min(chunk, left))

    def step(self, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Compute the next `counts` tokens of `rows`; returns the logits of each."""
        first = [self._computed[row] for row in rows]
        positions = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(first, counts, strict=True)]
        )
        owners = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        ids = [
            torch.tensor(self._prompts[row][start : start + n])
            for row, start, n in zip(rows, first, counts, strict=True)
        ]
        blocks = self._tables[owners, positions // self._block_size].long()
        answers = self._model.forward(
            self._pool,
            PackedBatch(
                token_ids=torch.cat(ids),
                positions=positions.int(),
                slots=blocks * self._block_size + positions % self._block_size,
                row_starts=torch.tensor([0, *counts]).cumsum(0).int(),
                context_lengths=torch.tensor(
                    [start + n for start, n in zip(first, counts, strict=True)]
                ).int(),
                block_tables=self._tables[list(rows)],
                logit_tokens=torch.arange(len(positions)),
            ),
        )
        for row, count in zip(rows, counts, strict=True):
            self._computed[row] += count
        return answers

    def greedy(self, num_tokens: int) -> list[list[int]]:
        """Prefill all prompts in one step, then decode; the new ids of each."""
        rows = list(range(len(self._prompts)))
        counts = [len(prompt) for prompt in self._prompts]
        made: list[list[int]] = [[] for _ in rows]
        for _ in range(num_tokens):
            answers = self.step(rows, counts)
            last = torch.tensor(counts).cumsum(0) - 1
            for row, token in zip(rows, answers[last].argmax(-1).tolist(), strict=True):
                made[row].append(token)
                self._prompts[row].append(token)
            counts = [1] * len(rows)
        return made


def all_logits(
    model: DecoderModel, prompts: Sequence[Sequence[int]], block_size: int = 16, decoded: int = 4
) -> list[Tensor]:
    """[len(prompt), vocab_size] of every prompt."""
    made: list[list[Tensor]] = [[] for _ in prompts]
    for row, _, answer in Teacher(model, prompts, block_size).logits(decoded):
        made[row].append(answer)
    return [torch.stack(answers) for answers in made]
