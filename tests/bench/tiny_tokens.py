"""A byte-level tokenizer with two merges, as a Hugging Face folder would hold it."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from services.bench.tokens import Tokens
from services.gateway.folder_tokenizer import from_folder


def save(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "he", "the"])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("t", "he")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


def tiny_tokens(folder):
    return Tokens(from_folder(save(folder)))
