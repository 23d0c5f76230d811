"""A tokenizer built from the metadata of a GGUF file.

GGUF names the way a text is cut before merging (`tokenizer.ggml.pre`) without saying what it is;
the cuts below are those of the models' own tokenizer.json files (and of llama.cpp's
`llm_tokenizer_bpe`). A name that is not here is refused: a wrong cut gives wrong ids silently.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from services.gateway.token_bytes import byte_level
from services.gateway.tokenizer import ChatFormat, ModelTokenizer
from shared.errors import StartError
from shared.gguf_header import read_header

_CONTROL: Final = 3  # llama.cpp's token types
_USER_DEFINED: Final = 4

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(pre: str) -> Any | None:
    match pre:
        case "smollm":  # each digit alone, then GPT-2's cut
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "llama-bpe":
            return _cut_by(_WORDS % "{1,3}")
        case "qwen2":
            return _cut_by(_WORDS % "")
    return None


def from_gguf(path: Path) -> ModelTokenizer:
    """The tokenizer and chat template in a GGUF file.

    Raises: StartError if the file has none, one of a kind that is not known here, or one whose
        parts do not fit together.
    """
    metadata = read_header(path).metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    cut = _pre_tokenizer(pre) if kind == "gpt2" else None
    if cut is None:
        raise StartError(
            f"{path}: its tokenizer is of kind {kind!r}, cut {pre!r}; this server builds gpt2 with "
            "smollm, gpt-2, llama-bpe or qwen2 from GGUF: use the model's Hugging Face folder"
        )
    core = _byte_pair_tokenizer(path, metadata)
    core.pre_tokenizer = cut
    core.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    named = _special_tokens(path, metadata)
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        _begin_with(path, core, named["bos_token"])
    template = metadata.get("tokenizer.chat_template")
    chat = ChatFormat(template, named) if isinstance(template, str) else None
    return ModelTokenizer(core, byte_level, chat)


def _byte_pair_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _array(path, metadata, "tokenizer.ggml.tokens", str)
    types = _array(path, metadata, "tokenizer.ggml.token_type", int)
    merges = _array(path, metadata, "tokenizer.ggml.merges", str)
    if len(types) != len(tokens) or not tokens:
        raise StartError(
            f"{path}: tokenizer.ggml.token_type has {len(types)} entries for the {len(tokens)} "
            "of tokenizer.ggml.tokens; each token needs one"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise StartError(f"{path}: tokenizer.ggml.merges names {' '.join(wrong)!r:.60}, no pair")
    try:
        model = models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=pairs,
            ignore_merges=metadata.get("tokenizer.ggml.pre") == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise StartError(
            f"{path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error})"
        ) from error
    core = Tokenizer(model)
    kinds = list(zip(tokens, types, strict=True))
    core.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    core.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )
    return core


def _array(path: Path, metadata: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    if key not in metadata:
        raise StartError(f"{path}: the file has no {key}")
    found = metadata[key]
    if not isinstance(found, list | tuple) or not all(isinstance(item, kind) for item in found):
        raise StartError(f"{path}: {key} is no array of {kind.__name__}")
    return found


def _special_tokens(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as a chat template names them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for part, name in names.items():
        key = f"tokenizer.ggml.{part}_token_id"
        token_id = metadata.get(key, len(tokens))
        if type(token_id) is not int:
            raise StartError(f"{path}: {key} is {token_id!r:.60}, no number of a token")
        if 0 <= token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def _begin_with(path: Path, core: Tokenizer, token: str) -> None:
    try:
        core.post_processor = processors.TemplateProcessing(
            single=f"{token} $A",
            special_tokens=[(token, core.token_to_id(token))],
        )
    except ValueError as error:  # a template is cut at spaces
        raise StartError(
            f"{path}: tokenizer.ggml.bos_token_id is {token!r:.60}, which this server cannot put "
            f"before a text ({error})"
        ) from error
