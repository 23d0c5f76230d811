"""How long a load must take on this machine: bytes over bandwidth, products over peak.

Both are measured in the same run (ops/bench/limits.cpp). A decode step reads every weight once and
the keys and values of every sequence once; a prompt costs its products, attention included, and a
prefix that all share only once. Nothing else is counted: no sampling, no sockets, no client.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

from ops.bench.contest.cells import Load
from services.executor.model.loader import expected_shapes, open_model
from shared.geometry import ModelShape
from shared.model_source import ModelSource


@dataclass(frozen=True)
class Limits:
    """Of the machine: bytes read a second, floating point operations a second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Reading and computing at once."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Work:
    """What a model's steps read and compute. `weights`: how many numbers, the head's included."""

    shape: ModelShape
    weights: int
    is_tied: bool
    element_bytes: int = 2

    @classmethod
    def of(cls, source: ModelSource) -> "Work":
        """Of a model's files."""
        with ExitStack() as files:
            config, _ = open_model(source, files)
        weights = sum(prod(shape) for shape in expected_shapes(config).values())
        shape = ModelShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
            config.hidden_size, config.vocab_size, config.max_position_embeddings,
        )  # fmt: skip
        return cls(shape, weights, config.tied)

    @property
    def _head(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def _inner(self) -> int:
        """Weights that every token is multiplied with."""
        return self.weights - self._head * (1 if self.is_tied else 2)

    def _attention_flops(self, pairs: float) -> float:
        """Of so many (query, key) pairs: a product for the score, one for the value."""
        return 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * pairs

    def decode_step(self, sequences: int, context: float) -> tuple[float, float]:
        """(bytes, flops) of one more token for each sequence."""
        read = (self._inner + self._head) * self.element_bytes
        read += sequences * context * self.shape.bytes_per_token(self.element_bytes)
        flops = 2 * sequences * (self._inner + self._head)
        return read, flops + self._attention_flops(sequences * context)

    def prefill_flops(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Of prompts as (tokens, tokens already cached before them); one row of the head each."""
        tokens = sum(new for new, _ in prompts)
        pairs = sum(new * (cached + (new + 1) / 2) for new, cached in prompts)
        return 2 * (tokens * self._inner + len(prompts) * self._head) + self._attention_flops(pairs)


@dataclass(frozen=True)
class Floor:
    """Of one load."""

    prefill_s: float
    step_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, load: Load, work: Work, limits: Limits) -> "Floor":
        """Every prompt computed, then every token in steps as full as the clients allow."""
        prefill_s = work.prefill_flops(load.computed_prompts) / limits.flops_per_s
        step_s = limits.seconds(*work.decode_step(load.sequences, load.mean_context))
        drawn_by_prompts = sum(plan.num_choices for plan in load.plans)
        steps = (load.output_tokens - drawn_by_prompts) / load.sequences
        whole_s = prefill_s + steps * step_s
        return cls(prefill_s, step_s, load.output_tokens / whole_s)
