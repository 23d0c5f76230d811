"""Every family we serve, tiny and random, equals transformers in float32."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from services.executor.model.config import config_from_folder
from shared.errors import StartError
from tests.executor.model.teacher import Teacher, all_logits
from tests.executor.model.tiny import (
    FAMILIES,
    load,
    make,
    random_prompts,
    reference_logits,
    write_gguf,
)
from tests.kernels.backends import BACKENDS

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    theirs = make(family, tmp_path)
    ours = load(tmp_path, backend=backend)
    assert ours.is_one_step == (backend != "numba" and family != "llama of odd width")
    longest = min(100, ours.shape.max_position_embeddings)
    prompts = random_prompts(ours.shape.vocab_size, 1, 7, min(60, longest), longest)
    expected = reference_logits(theirs, prompts)
    for block_size in (1, 5, 16):
        for got, wanted in zip(all_logits(ours, prompts, block_size), expected, strict=True):
            torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_gguf_equals_the_folder_it_was_made_from(family: str, kind: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", family, kind)
    folder, file = load(tmp_path), load(path)
    assert file.shape == folder.shape
    assert file.eos_token_ids == folder.eos_token_ids == (2,)
    prompts = random_prompts(128, 30)
    got, expected = all_logits(file, prompts)[0], all_logits(folder, prompts)[0]
    error = (got - expected).norm() / expected.norm()
    assert error < {"F32": 1e-6, "F16": 1e-2, "BF16": 5e-2, "Q8_0": 0.1, "Q4_1": 0.9}[kind]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_steps_equal_one(backend: str, tmp_path: Path) -> None:
    make("tied llama", tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(tmp_path, dtype, backend)
        prompts = random_prompts(128, 90, 33, 120)
        whole = [Teacher(model, prompts, 16).step([0, 1, 2], [90, 33, 120])]
        pieces = all_logits(model, prompts, block_size=16, decoded=20)
        assert torch.equal(torch.cat(pieces), whole[0])  # bit by bit, in any dtype


def test_only_wanted_tokens_get_logits(tmp_path: Path) -> None:
    make("llama", tmp_path)
    model = load(tmp_path)
    prompts = random_prompts(128, 12)
    teacher = Teacher(model, prompts, 16)
    assert teacher.step([0], [12]).shape == (12, 128)
    batch = pack_without_logits(prompts[0])
    assert model.forward(model.allocate_pool(1, 16), batch).shape == (0, 128)


def pack_without_logits(prompt: list[int]):  # type: ignore[no-untyped-def]
    from kernels.interface import PackedBatch

    positions = torch.arange(len(prompt))
    return PackedBatch(
        token_ids=torch.tensor(prompt),
        positions=positions.int(),
        slots=positions,
        row_starts=torch.tensor([0, len(prompt)], dtype=torch.int32),
        context_lengths=torch.tensor([len(prompt)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logit_tokens=torch.empty(0, dtype=torch.int64),
    )


def test_a_window_limits_the_longest_sequence_only_where_attention_has_none(tmp_path: Path) -> None:
    make("mistral with a window", tmp_path)
    assert load(tmp_path, backend="native").shape.max_position_embeddings == 256
    assert load(tmp_path, backend="numba").shape.max_position_embeddings == 128


def test_a_gguf_has_its_window_in_every_layer(tmp_path: Path) -> None:
    make("mistral with a narrow window", tmp_path)
    window = {"llama.attention.sliding_window": 13}
    file = load(write_gguf(tmp_path, tmp_path / "tiny.gguf", "llama", **window))
    prompts = random_prompts(128, 70)
    got, expected = all_logits(file, prompts)[0], all_logits(load(tmp_path), prompts)[0]
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("qwen2 with windows", {"layer_types": ["full_attention"]}, "each of 3 layers"),
        ("qwen2 with windows", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("mistral with a window", {"layer_types": ["full_attention"] * 3}, "'full_attention'"),
        ("mistral with a window", {"sliding_window": -4}, "sliding_window must be a positive"),
    ],
)
def test_windows_we_do_not_serve_are_refused(
    family: str, changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    make(family, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(StartError, match=why):
        load(tmp_path)


@pytest.mark.parametrize("given", ["absent", None, 13])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen2 with windows", "llama"])
def test_windows_are_those_that_transformers_reads(
    family: str, given: int | str | None, tmp_path: Path
) -> None:
    make(family, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"sliding_window": given}
    values.pop("layer_types", None)  # of the window that the file had
    if given == "absent":
        del values["sliding_window"]
    path.write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    window = None if family == "llama" else theirs.sliding_window
    usual = ["full_attention" if window is None else "sliding_attention"] * 3
    kinds = getattr(theirs, "layer_types", None) or usual
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    ours = config_from_folder(tmp_path)
    assert [ours.window_of(layer) for layer in range(3)] == expected
    if family.startswith("mistral") or family == "qwen2 with windows":
        assert expected[2] == {"absent": 4096}.get(str(given), given)


def test_several_eos_ids(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load(tmp_path).eos_token_ids == (2, 7)


def test_blocks_are_copied_with_all_layers(tmp_path: Path) -> None:
    make("llama", tmp_path)
    model = load(tmp_path)
    first, second = model.allocate_pool(4, 16), model.allocate_pool(4, 16)
    first.normal_()
    second.zero_()
    model.copy_blocks(first, second, torch.tensor([[1, 3], [0, 2]]))
    assert torch.equal(second[3], first[1])
    assert torch.equal(second[2], first[0])
    assert not second[:2].any()
    assert model.kv_bytes_per_token * 16 == first[0].nbytes
