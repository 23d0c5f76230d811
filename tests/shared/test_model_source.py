"""What `--model` may say."""

import pytest

from shared.errors import StartError
from shared.model_source import DEFAULT_MODEL, find_model


def test_the_toy_needs_no_files():
    assert find_model("toy").is_toy


@pytest.mark.model
def test_the_default_model_lies_in_its_wheel():
    source = find_model(DEFAULT_MODEL)
    assert (source.kind, source.path.suffix) == ("gguf", ".gguf")
    assert source.path.stat().st_size > 50_000_000


def test_a_folder_and_a_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert find_model(str(tmp_path)).kind == "folder"
    assert find_model(str(tmp_path / "small.gguf")).name == "small"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("/no/such/thing", "no such file or folder"),
        ("weights.bin", "no such file or folder"),
        (".", "has no config.json"),
    ],
)
def test_what_is_no_model_is_refused(name, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=complaint):
        find_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(StartError, match=r"must be a \.gguf"):
        find_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_that_brings_code_is_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_x.XModel"}}')
    with pytest.raises(StartError, match=rf"its {name} has an auto_map.*runs no code of models"):
        find_model(str(tmp_path))


def test_a_file_of_code_that_nothing_names_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    (tmp_path / "modeling_x.py").write_text("raise SystemExit")
    assert find_model(str(tmp_path)).kind == "folder"


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartError, match="the hub did not give it"):
        find_model("nobody/no-such-model")
