"""What a loader must refuse, and how: by name, before it costs anything."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.reference import ReferenceKernels
from services.executor.model.loader import load_model, load_onto
from shared.errors import StartError
from shared.model_source import ModelSource
from tests.executor.model.teacher import all_logits
from tests.executor.model.tiny import load, make, random_prompts, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("llama", tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refusal(path: Path) -> str:
    with pytest.raises(StartError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": None, "vocab_size": None}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": [1]}, "rope parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 12}, "not a multiple of 8"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"eos_token_id": 500}, "eos id 500"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"num_hidden_layers": 4}, "layers.3"),
        ({"num_hidden_layers": 2}, "is not part of this model"),
        ({"intermediate_size": 80}, "has shape (96, 64), not (80, 64)"),
    ],
)
def test_a_config_we_do_not_serve(folder: Path, changes: dict[str, Any], named: str) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, **changes)
    assert named in refusal(folder)


def test_broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json: is not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "is not a JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read" in refusal(folder)


def test_a_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(folder)


def test_an_extra_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(2)))
    assert "surprise is not part of this model" in refusal(folder)


def test_a_tensor_that_is_known_and_not_needed(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert load(folder).shape.num_layers == 3


def test_integers_are_no_weights(folder: Path) -> None:
    name = "model.norm.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64).int()}))
    assert "model.norm.weight has dtype I32" in refusal(folder)


def test_half_precision_weights_are_converted(folder: Path) -> None:
    prompts = random_prompts(128, 20)
    before = all_logits(load(folder), prompts)[0]

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.half() if "mlp" in name else tensor.bfloat16()

    change_tensors(folder, halve)
    after = all_logits(load(folder), prompts)[0]
    assert (after - before).norm() / before.norm() < 0.05


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_file(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "not complete" in refusal(folder)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'])
def test_a_broken_header(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert "broken header" in refusal(folder)


def test_an_offset_before_the_data(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert "model.norm.weight" in refusal(folder)


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled" in refusal(folder)


def split_in_two(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / part)
        weight_map.update(dict.fromkeys(chosen, part))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_weights(folder: Path) -> None:
    prompts = random_prompts(128, 20)
    before = all_logits(load(folder), prompts)[0]
    split_in_two(folder)
    assert torch.equal(all_logits(load(folder), prompts)[0], before)


def test_a_missing_shard(folder: Path) -> None:
    split_in_two(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors named by" in refusal(folder)


def test_an_index_that_leaves_its_folder(folder: Path) -> None:
    split_in_two(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert "outside its folder" in refusal(folder)
    index.write_text("{}")
    assert "no valid index" in refusal(folder)


def test_progress_is_told_in_percent(folder: Path) -> None:
    heard: list[str] = []
    load_model(
        ModelSource("tiny", "folder", folder), torch.float32, torch.device("cpu"), heard.append
    )
    assert heard[-1] == "loading weights 100 %"
    assert len(heard) == len(set(heard)) > 5


def test_dtypes_and_devices_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = ModelSource("tiny", "folder", folder)
    with pytest.raises(StartError, match="--dtype float16"):
        load_model(source, torch.float16, torch.device("cpu"), lambda _: None)
    with pytest.raises(StartError, match="sees no GPU"):
        load_model(source, torch.float32, torch.device("cuda"), lambda _: None)
    with pytest.raises(StartError, match="cpu and cuda"):
        load_model(source, torch.float32, torch.device("meta"), lambda _: None)


def test_weights_and_pools_are_where_they_were_asked_for(folder: Path) -> None:
    source, elsewhere = ModelSource("tiny", "folder", folder), torch.device("meta")
    kernels = ReferenceKernels(torch.float16)
    model = load_onto(kernels, source, lambda _: None, device=elsewhere)
    pool = model.allocate_pool(3, 16)
    assert (pool.device.type, model.allocate_swap_pool(3, 16).device.type) == ("meta", "cpu")
    assert pool.dtype == torch.float16


# ------------------------------------------------------------------------------------ GGUF


@pytest.fixture
def gguf_file(folder: Path) -> Path:
    return write_gguf(folder, folder / "tiny.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 300, 3000, -1])
def test_a_truncated_gguf(gguf_file: Path, kept: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept])
    message = refusal(gguf_file)
    assert str(gguf_file) in message
    assert any(word in message for word in ("no GGUF", "ends too early", "not complete"))


def test_a_gguf_of_another_version(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:4] + struct.pack("<I", 1) + data[8:])
    assert "version 1" in refusal(gguf_file)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_gguf_header_is_a_clear_error_or_harmless(gguf_file: Path, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    data = bytearray(gguf_file.read_bytes())
    for _ in range(4):
        place = int(torch.randint(8, 2600, (), generator=random))
        data[place] = int(torch.randint(256, (), generator=random))
    gguf_file.write_bytes(data)
    with contextlib.suppress(StartError):  # and no other error, hang or crash
        load(gguf_file)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
    ],
)
def test_gguf_metadata_we_do_not_serve(folder: Path, keys: dict[str, Any], named: str) -> None:
    assert named in refusal(write_gguf(folder, folder / "other.gguf", **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling.type": "linear", "scaling.factor": 2.0},
        {"scaling.factor": 2.0},
        {"scale_linear": 2.0},
        {"scaling.type": "linear", "scale_linear": 2.0},
        {"scaling.factor": 2.0, "scale_linear": 3.0},
    ],
    ids=str,
)
def test_gguf_linear_scaling_equals_the_folders(tmp_path: Path, keys: dict[str, Any]) -> None:
    make("linear rope", tmp_path)
    keys = {f"llama.rope.{name}": value for name, value in keys.items()}
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", **keys)
    prompts = random_prompts(128, 40)
    got, expected = (all_logits(load(place), prompts)[0] for place in (path, tmp_path))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling.type": "none", "scaling.factor": 2.0},
        {"scaling.type": "linear"},
        {"scaling.factor": 0.0, "scale_linear": 3.0},
    ],
    ids=str,
)
def test_a_gguf_may_say_that_it_scales_nothing(folder: Path, keys: dict[str, Any]) -> None:
    keys = {f"llama.rope.{name}": value for name, value in keys.items()}
    path = write_gguf(folder, folder / "tiny.gguf", **keys)
    prompts = random_prompts(128, 40)
    got, expected = (all_logits(load(place), prompts)[0] for place in (path, folder))
    torch.testing.assert_close(got, expected)


def test_gguf_divisors_come_on_top_of_linear_scaling(tmp_path: Path) -> None:
    four = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    make("linear rope", tmp_path, rope_parameters=four)
    path = write_gguf(
        tmp_path,
        tmp_path / "tiny.gguf",
        rope_divisors=torch.full((8,), 2.0),
        **{"llama.rope.scaling.factor": 2.0},
    )
    prompts = random_prompts(128, 40)
    got, expected = (all_logits(load(place), prompts)[0] for place in (path, tmp_path))
    torch.testing.assert_close(got, expected)


def test_a_gguf_of_another_architecture(folder: Path) -> None:
    assert "general.architecture 'qwen2moe'" in refusal(
        write_gguf(folder, folder / "other.gguf", "qwen2moe")
    )
