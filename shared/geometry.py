"""Sizes: of a model's KV cache, and of the blocks it is cut into."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and kernels need to know of a model.

    >>> OPT_13B = ModelShape(40, 40, 40, 128, 5120, 50272, 2048)
    >>> OPT_13B.bytes_per_token(2)  # Kwon et al. 2023, section 3: 800 KB
    819200
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values one token takes over all layers; `element_bytes` per number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def blocks_in(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens occupy; only the last may be partly filled.

    >>> blocks_in(7, 4), blocks_in(8, 4), blocks_in(0, 4)
    (2, 2, 0)
    """
    return -(-num_tokens // block_size)
