"""The models whose beam searches are compared: one of random weights, one trained, and the real."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from tests.executor.model.test_stories import DATA, write_folder

REAL: Final = "smollm2"
SMALL: Final = ("random", "stories")
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 120,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip


def write_small(name: str, folder: Path) -> None:
    """One of the small models as a Hugging Face folder."""
    if name == "stories":
        write_folder(DATA / "stories260K.bin", folder)
    else:
        write_random(folder)


def write_random(folder: Path) -> None:
    """Weights from a seed, by a stream of NumPy's that is promised never to change."""
    random = np.random.RandomState(20_261_130)

    def weights(*shape: int, scale: float = 0.2) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    def norm() -> np.ndarray[Any, Any]:
        return weights(CONFIG["hidden_size"]) + np.float32(1)

    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": weights(CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.self_attn.q_proj.weight": weights(queries, hidden),
            f"{name}.self_attn.k_proj.weight": weights(keys, hidden),
            f"{name}.self_attn.v_proj.weight": weights(keys, hidden),
            f"{name}.self_attn.o_proj.weight": weights(hidden, queries),
            f"{name}.post_attention_layernorm.weight": norm(),
            f"{name}.mlp.gate_proj.weight": weights(inner, hidden),
            f"{name}.mlp.up_proj.weight": weights(inner, hidden),
            f"{name}.mlp.down_proj.weight": weights(hidden, inner),
        }
    tensors["model.norm.weight"] = norm()
    tensors["lm_head.weight"] = weights(CONFIG["vocab_size"], hidden, scale=0.5)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
