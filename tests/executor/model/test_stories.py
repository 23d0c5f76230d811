"""stories260K, a tiny model that was really trained: and its golden greedy tokens."""

import json
import struct
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.executor.model.teacher import Teacher
from tests.executor.model.tiny import load
from tests.kernels.backends import BACKENDS

DATA: Final = Path(__file__).parents[2] / "data"
GOLDEN: Final = json.loads((DATA / "stories260K_golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    write_folder(DATA / "stories260K.bin", folder)
    return folder


def write_folder(source: Path, folder: Path) -> None:
    """A llama2.c file as a Hugging Face folder; its q, k rows are interleaved pairs."""
    raw = source.read_bytes()
    dim, inner, layers, heads, kv_heads, vocab, longest = struct.unpack("<7i", raw[:28])
    numbers = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy())
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = torch.Size(shape).numel()
        place += count
        return numbers[place - count : place].view(shape)

    def halves(rows: torch.Tensor, count: int) -> torch.Tensor:
        pairs = rows.view(count, -1, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    kv_dim = dim // heads * kv_heads
    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    parts = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, dim, dim),
        "self_attn.k_proj": take(layers, kv_dim, dim),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, inner, dim),
        "mlp.down_proj": take(layers, dim, inner),
        "mlp.up_proj": take(layers, inner, dim),
    }
    turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    for name, stacked in parts.items():
        for layer, tensor in enumerate(stacked):
            own = halves(tensor, turned[name]) if name in turned else tensor
            tensors[f"model.layers.{layer}.{name}.weight"] = own.clone()
    tensors["model.norm.weight"] = take(dim)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    config = {
        "model_type": "llama", "hidden_size": dim, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_greedy_tokens_are_the_golden_ones(stories: Path, block_size: int, backend: str) -> None:
    cases = GOLDEN["cases"]
    teacher = Teacher(
        load(stories, backend=backend), [case["prompt_ids"] for case in cases], block_size
    )
    made = teacher.greedy(min(64, *(len(case["greedy_ids"]) for case in cases)))
    for case, ids in zip(cases, made, strict=True):
        assert ids == case["greedy_ids"][: len(ids)], case["prompt"]


def test_the_published_story_to_its_end(stories: Path) -> None:
    case = GOLDEN["cases"][0]
    teacher = Teacher(load(stories), [case["prompt_ids"] + case["greedy_ids"][:-1]], 16)
    answers = [answer for _, _, answer in teacher.logits(decoded=64)]
    predicted = torch.stack(answers).argmax(-1).tolist()
    assert predicted[len(case["prompt_ids"]) - 1 :] == case["greedy_ids"]
