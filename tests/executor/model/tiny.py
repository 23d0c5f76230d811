"""Tiny models with random weights, as transformers writes them, and a GGUF of the same numbers."""

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from kernels.select import select_kv_dtype
from services.executor.model.llama import Llama
from services.executor.model.loader import load_onto
from shared.model_source import ModelSource
from tests.kernels.backends import BACKENDS

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("Llama", {"head_dim": 24}),
    "llama of odd width": ("Llama", {"intermediate_size": 90, "vocab_size": 100}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 128, "head_dim": 16}),
    "mistral with a narrow window": ("Mistral", {"sliding_window": 13, "head_dim": 16}),
    "qwen2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2 with windows here and there": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "untied qwen2": ("Qwen2", {"tie_word_embeddings": False}),
}


def make(family: str, folder: Path, **changes: Any) -> Any:
    """Write a random model of `family` into `folder`; returns transformers' own."""
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options | changes))
    config.attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    backend: str = "native",
    kv_cache_dtype: str = "auto",
) -> Llama:
    """Our model from a folder or a GGUF file, on one of the back ends."""
    kind: Any = "folder" if path.is_dir() else "gguf"
    kernels = BACKENDS[backend](dtype)
    kv_dtype = select_kv_dtype(kernels, kv_cache_dtype)
    return load_onto(kernels, ModelSource("tiny", kind, path), lambda _: None, kv_dtype)


def reference_logits(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """transformers' logits of every position of every prompt."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def random_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=random).tolist() for n in lengths]


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    rope_divisors: Tensor | None = None,
    **keys: Any,
) -> Path:
    """The model in `folder` as llama.cpp's converter writes it: Llama's q, k rows interleaved."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(128)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(128)])
    for key, value in keys.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.numpy())
    for name, tensor in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        numbers = tensor
        if heads and architecture == "llama":
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(tensor.shape)
        stored = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        data = gguf.quantize(numbers.contiguous().numpy(), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{end}"
    return f"{GGUF_NAMES[stem]}.{end}"
