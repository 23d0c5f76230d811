"""Ids equal to the reference's, and every id's bytes equal to the library's decoding."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import ToyTokenizer, load_tokenizer
from shared.errors import StartError
from shared.gguf_header import read_header
from shared.model_source import ModelSource, find_model
from tests.gateway.tiny_models import gguf

PROMPTS = [
    json.loads(line)
    for line in Path("tests/data/smollm2_prompts.jsonl").read_text(encoding="utf-8").splitlines()
]


def folder_of(path: Path, core: tokenizers.Tokenizer) -> ModelSource:
    (path / "config.json").write_text("{}", encoding="utf-8")
    core.save(str(path / "tokenizer.json"))
    return find_model(str(path))


def byte_level_core() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    core.add_tokens([AddedToken("<tool é>", normalized=False)])
    return core


# ------------------------------------------------------------------ the real model's


@pytest.mark.model
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["lang"])
def test_ids_equal_the_reference(smollm2, prompt) -> None:
    ids = smollm2.encode(prompt["text"], add_special_tokens=True)
    assert list(ids) == prompt["ids"]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(find_model("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def library():
    """The same vocabulary, decoded by the tokenizers library."""
    metadata = read_header(find_model("smollm2-135m-instruct").path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    core = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.add_special_tokens(tokens[:17])
    core.decoder = decoders.ByteLevel()
    return core


@pytest.mark.model
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_deltas_join_to_the_whole_decoding_of_the_real_vocabulary(smollm2, library, data) -> None:
    texts = st.sampled_from([prompt["ids"] for prompt in PROMPTS])
    random_ids = st.lists(st.integers(0, 49_151), max_size=30)
    ids = data.draw(
        random_ids | texts | st.tuples(texts, random_ids).map(lambda two: [*two[0], *two[1]])
    )
    detokenizer = Detokenizer(smollm2)
    joined = "".join([detokenizer.feed([token_id]) for token_id in ids]) + detokenizer.flush()
    assert joined == library.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_the_real_chat_template_is_there(smollm2) -> None:
    assert smollm2.chat.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in smollm2.chat.template
    assert smollm2.vocab_size == 49_152


@pytest.mark.model
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["lang"])
def test_ids_become_their_text_again(smollm2, prompt) -> None:
    assert smollm2.decode(prompt["ids"]) == prompt["text"]


@pytest.mark.model
def test_special_tokens_are_written_out_and_unknown_ids_left_out(smollm2) -> None:
    ids = smollm2.encode("<|im_start|>Hi world<|im_end|>", add_special_tokens=False)
    assert smollm2.decode(ids) == "<|im_start|>Hi world<|im_end|>"
    assert [smollm2.name_of(i) for i in ids] == ["<|im_start|>", "Hi", "Ġworld", "<|im_end|>"]
    assert smollm2.decode([*ids, 49_152, 2**40]) == smollm2.decode(ids)
    assert smollm2.name_of(2**40) == ""


# ------------------------------------------------------------------ the toy's


def test_the_toys_ids_are_bytes() -> None:
    toy = ToyTokenizer()
    assert toy.encode("é!", add_special_tokens=True) == (0xC3, 0xA9, ord("!"))
    assert [toy.bytes_of(token_id) for token_id in (65, 256, 257, 511, -1)] == [b"A"] + [b""] * 4


@given(ids=st.lists(st.integers(0, 300), max_size=40), cut=st.integers(0, 40))
def test_text_does_not_depend_on_how_tokens_came(ids: list[int], cut: int) -> None:
    one, two, three = (Detokenizer(ToyTokenizer()) for _ in range(3))
    whole = one.feed(ids) + one.flush()
    assert two.feed(ids[:cut]) + two.feed(ids[cut:]) + two.flush() == whole
    assert "".join([three.feed([i]) for i in ids]) + three.flush() == whole
    assert whole == bytes([i for i in ids if i < 256]).decode("utf-8", "replace")


@given(text=st.text(max_size=50))
def test_a_valid_texts_deltas_hold_no_replacement_of_their_own(text: str) -> None:
    detokenizer = Detokenizer(ToyTokenizer())
    deltas = [detokenizer.feed([byte]) for byte in text.encode()]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""


# ------------------------------------------------------------------ GGUF


def test_metadata_equals_the_gguf_packages(tmp_path: Path) -> None:
    path = gguf(tmp_path)
    theirs = {
        name: field.contents()
        for name, field in GGUFReader(path).fields.items()
        if not name.startswith("GGUF.")
    }
    ours = read_header(path).metadata
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in ours.items()} == theirs


def test_a_gguf_tokenizer_cuts_merges_and_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelSource("tiny", "gguf", gguf(tmp_path)))
    with_bos = tokenizer.encode("abc ab12", add_special_tokens=True)
    assert with_bos[0] == 0
    assert [tokenizer.bytes_of(i) for i in with_bos] == [b"", b"abc", b" ", b"ab", b"1", b"2"]
    plain = tokenizer.encode("abc</s>", add_special_tokens=False)
    assert [tokenizer.bytes_of(i) for i in plain] == [b"abc", b""], "</s> is the special token"
    assert tokenizer.chat.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=40)
def test_every_cut_keeps_the_text(pre: str, text: str, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = load_tokenizer(ModelSource("tiny", "gguf", gguf(folder, pre=pre)))
    ids = tokenizer.encode(text.replace("<", ""), add_special_tokens=False)
    joined = b"".join(map(tokenizer.bytes_of, ids)).decode()
    if pre != "qwen2":  # which composes characters first (NFC)
        assert joined == text.replace("<", "")


def test_numbers_are_cut_as_the_model_was_trained(tmp_path: Path) -> None:
    def cut(pre: str) -> list[bytes]:
        tokenizer = load_tokenizer(ModelSource("tiny", "gguf", gguf(tmp_path, pre=pre)))
        return [tokenizer.bytes_of(i) for i in tokenizer.encode("12", add_special_tokens=False)]

    assert cut("gpt-2") == cut("llama-bpe") == [b"12"]
    assert cut("smollm") == cut("qwen2") == [b"1", b"2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"kind": "llama"}, "'llama'"),
        ({"merges": ()}, "no tokenizer.ggml.merges"),
        ({"merges": ("a b", "b zz")}, "tokenizer.ggml.merges do not fit .*zz"),
        ({"merges": ("a b", "ab")}, "tokenizer.ggml.merges names 'ab', no pair"),
        ({"num_types": 100}, "tokenizer.ggml.token_type has 100 entries for the 262 "),
        ({"bos": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>'"),
        ({"first": "a b"}, "tokenizer.ggml.bos_token_id is 'a b'"),
    ],
)
def test_an_unknown_or_damaged_gguf_tokenizer_is_refused_by_name(
    tmp_path: Path, options, said
) -> None:
    with pytest.raises(StartError, match=rf"tiny\.gguf: .*{said}.*\Z"):  # one line
        load_tokenizer(ModelSource("tiny", "gguf", gguf(tmp_path, **options)))


@given(cut=st.integers(0, 3000))
@settings(deadline=None, max_examples=60)
def test_a_cut_off_gguf_is_refused(cut: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    path = gguf(folder)
    content = path.read_bytes()
    path.write_bytes(content[: min(cut, len(content) - 100)])
    with pytest.raises(StartError, match=r"tiny\.gguf"):
        read_header(path)


# ------------------------------------------------------------------ Hugging Face folders


def test_a_folders_tokens_decode_as_the_library_does(tmp_path: Path) -> None:
    core = byte_level_core()
    tokenizer = load_tokenizer(folder_of(tmp_path, core))
    ids = list(tokenizer.encode("é<tool é>世<|end|>", add_special_tokens=False))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(ids) + detokenizer.flush() == core.decode(ids) == "é<tool é>世"
    assert tokenizer.chat is None


def test_a_sentencepiece_folder_keeps_spaces_and_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<0xE4>", "<0xB8>", "<0x96>", "▁a", "▁▁b"]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = load_tokenizer(folder_of(tmp_path, core))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in (4, 1, 2, 3, 5)] == [" a", "", "", "世", "  b"]


def test_a_folders_template_and_special_tokens_are_read(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level_core()))
    assert tokenizer.chat.template == "y"
    assert tokenizer.chat.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("z", encoding="utf-8")
    assert load_tokenizer(find_model(str(tmp_path))).chat.template == "z"


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    source = find_model(str(tmp_path))
    with pytest.raises(StartError, match=r"tokenizer\.json is missing"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("[]", encoding="utf-8")
    with pytest.raises(StartError, match="cannot be read as a tokenizer"):
        load_tokenizer(source)
    core = byte_level_core()
    core.decoder = decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartError, match="WordPiece"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("chat_template.jinja", b"{{ messages }}\xff", "cannot be read as UTF-8 text"),
        ("tokenizer_config.json", b'{"chat_template": ["{{ messages }}"]}', "its chat_template"),
        ("tokenizer_config.json", b'{"chat_template": "\xff"}', "cannot be read as JSON"),
        ("tokenizer_config.json", b"[" * 200_000, "cannot be read as JSON"),
    ],
)
def test_a_damaged_file_of_a_folder_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    source = folder_of(tmp_path, byte_level_core())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartError, match=f"{re.escape(name)}: {said}"):
        load_tokenizer(source)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[]))
    core.decoder = decoders.ByteLevel()
    with pytest.raises(StartError, match="its vocabulary is empty"):
        load_tokenizer(folder_of(tmp_path, core))
