"""Models small enough to be made by a test."""

from pathlib import Path

from gguf import GGUFWriter
from tokenizers import pre_tokenizers


def gguf(folder: Path, *, pre: str = "smollm", kind: str = "gpt2", merges: bool = True) -> Path:
    """A small vocabulary: all bytes, a few merges, two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "ab", "abc", "Ġa", "12"]
    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    if merges:
        writer.add_token_merges(["a b", "ab c", "Ġ a", "1 2"])
    writer.add_bos_token_id(0)
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
