"""Models small enough to be made by a test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gguf import GGUFWriter
from tokenizers import pre_tokenizers

MERGES: Final = ("a b", "ab c", "Ġ a", "1 2")


def gguf(
    folder: Path,
    *,
    pre: str = "smollm",
    kind: str = "gpt2",
    merges: Sequence[str] = MERGES,
    num_types: int | None = None,
    first: str = "<s>",
    bos: int | str = 0,
) -> Path:
    """A small vocabulary: all bytes, a few merges, two control tokens; and what may be wrong."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [first, "</s>", *alphabet, "ab", "abc", "Ġa", "12"]
    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(([3, 3] + [1] * (len(tokens) - 2))[:num_types])
    if merges:
        writer.add_token_merges(merges)
    if isinstance(bos, str):
        writer.add_string("tokenizer.ggml.bos_token_id", bos)
    else:
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_float32("some.float", 0.5)
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
