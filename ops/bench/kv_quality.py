"""What a smaller KV cache costs in quality: perplexity and agreement with the exact cache.

    python -m ops.bench.kv_quality [--dtype float32] [--kv auto,bf16,int8] [--pieces 8]
        [--length 1024] [--text F]

Real text is cut into pieces, each a sequence of its own, and fed token by known token (teacher
forcing) in chunks through the paged cache, so that every token attends to what the cache kept. The
first of `--kv` is the exact cache that the others are held against, all over the same weights:

  perplexity  exp of the mean of -log p(next token)
  top-1       positions where the likeliest token is the exact cache's
  top-1, clear  the same where the exact cache's first is twice as likely as its second
  KL          mean of sum p log(p / q), p with the exact cache, in thousandths of a nat
  logits      mean of |difference| / |exact|, lengths of the logits as vectors
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.interface import PackedBatch
from services.executor.model.llama import Llama
from services.executor.model.loader import load_model
from services.gateway.tokenizer import load_tokenizer
from shared.geometry import blocks_in
from shared.model_source import DEFAULT_MODEL, ModelSource, find_model

TEXT = Path(__file__).parents[2] / "services" / "bench" / "corpus.txt"
BLOCK_SIZE = 16
CHUNK = 128
CLEAR = math.log(2)


@dataclass
class Quality:
    """Sums over the positions of one cache; see the top of this file."""

    positions: int = 0
    surprise: float = 0.0
    agreeing: int = 0
    clear: int = 0
    agreeing_clear: int = 0
    divergence: float = 0.0
    error: float = 0.0

    def add(self, exact: Tensor, got: Tensor, following: Tensor) -> None:
        """Logits [n, vocab_size] after n tokens, and the tokens that follow."""
        wanted, ours = exact.log_softmax(-1), got.log_softmax(-1)
        best = wanted.topk(2).values
        agrees = exact.argmax(-1) == got.argmax(-1)
        is_clear = best[:, 0] - best[:, 1] > CLEAR
        self.positions += len(following)
        self.surprise -= float(ours.gather(1, following[:, None]).double().sum())
        self.agreeing += int(agrees.sum())
        self.clear += int(is_clear.sum())
        self.agreeing_clear += int((agrees & is_clear).sum())
        self.divergence += float((wanted.exp() * (wanted - ours)).sum().double())
        self.error += float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).double().sum())

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.surprise / self.positions)

    @property
    def agreement(self) -> float:
        """The share of positions whose likeliest token is the exact cache's."""
        return self.agreeing / self.positions

    def row(self, name: str, bytes_per_token: int) -> str:
        """A row of the table."""
        return (
            f"| {name} | {bytes_per_token:,} | {self.perplexity:.4f} | {self.agreement:.2%} | "
            f"{self.agreeing_clear / self.clear:.2%} | "
            f"{1000 * self.divergence / self.positions:.3f} | {self.error / self.positions:.1e} |"
        )


def chunks_of(model: Llama, ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits [n, vocab_size] of chunk after chunk of one sequence."""
    num_blocks = blocks_in(len(ids), BLOCK_SIZE)
    pool = model.allocate_pool(num_blocks, BLOCK_SIZE)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    for start in range(0, len(ids), CHUNK):
        end = min(start + CHUNK, len(ids))
        positions = torch.arange(start, end)
        yield model.forward(
            pool,
            PackedBatch(
                token_ids=torch.tensor(ids[start:end]),
                positions=positions.int(),
                slots=table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
                row_starts=torch.tensor([0, end - start], dtype=torch.int32),
                context_lengths=torch.tensor([end], dtype=torch.int32),
                block_tables=table[None],
                logit_tokens=torch.arange(end - start),
            ),
        )


def compare(models: dict[str, Llama], pieces: Sequence[Sequence[int]]) -> dict[str, Quality]:
    """Every model's quality; the first is the exact one."""
    found = {name: Quality() for name in models}
    for ids in pieces:
        following, start = torch.tensor(ids[1:]), 0
        chunks = [chunks_of(model, ids[:-1]) for model in models.values()]
        for exact, *others in zip(*chunks, strict=True):
            after = following[start : start + len(exact)]
            start += len(exact)
            for quality, got in zip(found.values(), (exact, *others), strict=True):
                quality.add(exact, got, after)
    return found


def pieces_of(text: Path, source: ModelSource, pieces: int, length: int) -> list[Sequence[int]]:
    """Real text in so many sequences of `length` tokens.

    Raises: ValueError if it has fewer.
    """
    needed = pieces * length
    start = text.read_text(encoding="utf-8")[: 8 * needed]
    ids = load_tokenizer(source).encode(start, add_special_tokens=False)
    if len(ids) < needed:
        raise ValueError(f"{text} has {len(ids)} tokens of the {needed} asked for")
    return [ids[at : at + length] for at in range(0, needed, length)]


def main() -> None:
    """Read the command line, load, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--kv", default="auto,bf16,int8")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()
    source = find_model(options.model)
    try:
        pieces = pieces_of(options.text, source, options.pieces, options.length)
    except ValueError as error:
        parser.error(str(error))
    models = {
        name: load_model(
            source, getattr(torch, options.dtype), torch.device("cpu"), lambda _: None, name
        )
        for name in options.kv.split(",")
    }
    print(f"{source.name}, weights {options.dtype}, {options.pieces} x {options.length} tokens")
    print("| KV cache | bytes a token | perplexity | top-1 | top-1, clear | KL, 1e-3 | logits |")
    print("|---|---|---|---|---|---|---|")
    for (name, model), quality in zip(
        models.items(), compare(models, pieces).values(), strict=True
    ):
        print(quality.row(f"{name} ({model.kv_dtype})", model.kv_bytes_per_token))


if __name__ == "__main__":
    main()
