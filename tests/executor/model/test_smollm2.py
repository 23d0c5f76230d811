"""The default model, teacher-forced against transformers in float32, over real prompts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from services.executor.model.llama import Llama
from services.executor.model.loader import load_model, load_onto
from shared.model_source import DEFAULT_MODEL, find_model
from tests.executor.model.teacher import Teacher
from tests.kernels.backends import BACKENDS

pytestmark = pytest.mark.model

DATA: Final = Path(__file__).parents[2] / "data"
LONGEST: Final = 48
LONG: Final = 700
NEAR_TIE: Final = 1e-4
ALLOWED_MB_WHILE_LOADING: Final = 150


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    lines = (DATA / "smollm2_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chosen: dict[str, list[int]] = {}
    for line in map(json.loads, lines):
        if len(line["ids"]) >= 10:
            chosen.setdefault(f"{line['lang']} {line['category']}", line["ids"][:LONGEST])
    assert len(chosen) >= 20
    return list(chosen.values())


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model()


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [reference(torch.tensor([ids])).logits[0] for ids in prompts]


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest) -> Llama:
    kernels = BACKENDS[request.param](torch.float32)
    return load_onto(kernels, find_model(DEFAULT_MODEL), lambda _: None)


def transformers_model() -> Any:
    """LlamaForCausalLM with the GGUF's weights, read by the gguf package's own reader."""
    reader = gguf.GGUFReader(find_model(DEFAULT_MODEL).path)
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        stem = tensor.name.removesuffix(".weight")
        part = stem.rpartition(".")[2]
        if part in ("attn_q", "attn_k"):
            heads = 9 if part == "attn_q" else 3
            numbers = numbers.view(heads, 32, 2, 576).transpose(1, 2).reshape(numbers.shape)
        if stem.startswith("blk."):
            name = f"model.layers.{stem.split('.')[1]}.{parts[part]}"
        else:
            name = names[stem]
        state[f"{name}.weight"] = numbers
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    rebuilt = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    model.model.rotary_emb = rebuilt
    return model.eval()


SIZES = [
    (name, size) for name in BACKENDS for size in ((1, 8, 16, 32) if name == "native" else (16,))
]
"""Back ends and block sizes; the tests of the kernels alone try them all."""


@pytest.mark.parametrize(("ours", "block_size"), SIZES, indirect=["ours"])
def test_every_position_agrees(
    ours: Llama, prompts: list[list[int]], expected: list[Tensor], block_size: int
) -> None:
    largest, positions, near_ties = 0.0, 0, 0
    for row, position, logits in Teacher(ours, prompts, block_size, seed=block_size).logits(8):
        wanted = expected[row][position]
        largest = max(largest, float((logits - wanted).abs().max()))
        positions += 1
        if logits.argmax() != wanted.argmax():
            best = wanted.topk(2).values
            assert best[0] - best[1] < NEAR_TIE, (row, position)
            near_ties += 1
    print(f"block size {block_size}: {positions} positions, {near_ties} near ties differ, "
          f"largest logit difference {largest:.2e}")  # fmt: skip
    assert largest < 2e-3
    assert near_ties <= positions / 2000
    assert positions == sum(len(ids) for ids in prompts)


@pytest.mark.parametrize("ours", BACKENDS, indirect=True)
def test_a_long_context_agrees_too(ours: Llama, reference: Any, prompts: list[list[int]]) -> None:
    """Over two boundaries of the 256 keys that attention works through at a time."""
    ids = [token_id for prompt in prompts for token_id in prompt][:LONG]
    assert len(ids) == LONG
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0]
    largest, differing = 0.0, 0
    for _, position, logits in Teacher(ours, [ids], 16).logits(40, largest_chunk=200):
        largest = max(largest, float((logits - wanted[position]).abs().max()))
        if logits.argmax() != wanted[position].argmax():
            best = wanted[position].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, position
            differing += 1
    print(f"{LONG} tokens: {differing} near ties differ, largest logit difference {largest:.2e}")
    assert largest < 2e-3
    assert differing <= LONG / 2000


def test_bfloat16_is_near_float32(prompts: list[list[int]], expected: list[Tensor]) -> None:
    source = find_model(DEFAULT_MODEL)
    model = load_model(source, torch.bfloat16, torch.device("cpu"), lambda _: None)
    teacher = Teacher(model, prompts[:8], 16)
    errors = [
        float((logits - expected[row][position]).norm() / expected[row][position].norm())
        for row, position, logits in teacher.logits(8)
    ]
    print(f"bfloat16: mean error {sum(errors) / len(errors):.2e}, largest {max(errors):.2e}")
    assert sum(errors) / len(errors) < 0.03


PROBE: Final = """
import sys, torch
from kernels.select import select_kernels
from services.executor.model.loader import load_model
from shared.model_source import DEFAULT_MODEL, find_model

def kilobytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))

dtype, quantization = getattr(torch, sys.argv[1]), sys.argv[2] or None
select_kernels(torch.device("cpu"), dtype, quantization)
print(kilobytes("VmHWM"))
source, device = find_model(DEFAULT_MODEL), torch.device("cpu")
model = load_model(source, dtype, device, lambda _: None, "auto", quantization)
print(kilobytes("VmHWM"))
"""


@pytest.mark.parametrize(
    ("dtype", "quantization", "element_bytes"),
    [("bfloat16", "", 2), ("float32", "", 4), ("bfloat16", "int8", 1)],
)
def test_loading_needs_little_more_than_the_weights(
    dtype: str, quantization: str, element_bytes: int
) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, dtype, quantization],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    bare, peak = (int(line) / 1024 for line in done.stdout.split())
    weights = 134_515_008 * element_bytes / 2**20
    told = f"bare {bare:.0f} MiB, peak {peak:.0f} MiB, weights {weights:.0f} MiB"
    print(f"{dtype} {quantization}: {told}")
    assert peak < bare + weights + ALLOWED_MB_WHILE_LOADING
