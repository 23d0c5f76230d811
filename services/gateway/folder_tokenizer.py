"""A tokenizer read from a Hugging Face folder: tokenizer.json and the files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from services.gateway.token_bytes import of_decoder
from services.gateway.tokenizer import ChatFormat, ModelTokenizer
from shared.errors import StartError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
          "mask_token")  # fmt: skip


def from_folder(folder: Path) -> ModelTokenizer:
    """The tokenizer and chat template of a model folder.

    Raises: StartError if there is no tokenizer.json, one of a kind that is not known here, or a
        file that is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise StartError(
            f"{path} is missing: this server reads tokenizers from tokenizer.json only; "
            "transformers writes it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise StartError(f"{path}: cannot be read as a tokenizer ({error})") from error
    if not core.get_vocab_size(with_added_tokens=True):
        raise StartError(f"{path}: its vocabulary is empty")
    core.no_truncation()
    core.no_padding()
    decoder = _read_json(path).get("decoder")
    token_bytes = of_decoder(decoder)
    if token_bytes is None:
        raise StartError(
            f"{path}: its decoder {json.dumps(decoder)[:200]} is not known here; this server "
            "knows ByteLevel (GPT-2, Llama 3, Qwen2, SmolLM) and ByteFallback (Llama 2, Mistral)"
        )
    return ModelTokenizer(core, token_bytes, _chat_format(folder))


def _chat_format(folder: Path) -> ChatFormat | None:
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    template = _template(folder, path, config)
    if template is None:
        return None
    return ChatFormat(template, _special_tokens(config))


def _template(folder: Path, config_path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"{own_file}: cannot be read as UTF-8 text ({error})") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        if not all(isinstance(entry, dict) for entry in template):
            raise StartError(
                f'{config_path}: its chat_template is no list of {{"name": ..., "template": ...}}'
            )
        defaults = [entry for entry in template if entry.get("name") == "default"]
        template = defaults[-1].get("template") if defaults else None
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise StartError(f"{path}: is no JSON object")
    return content
