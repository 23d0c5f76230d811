"""The weights in other servers' forms hold the numbers that Splitflap computes with."""

from contextlib import ExitStack
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from ops.bench.contest.cells import CELLS, Load
from ops.bench.contest.runners import OfflineRunner
from ops.bench.contest.weights import weights_of
from services.bench.plan import Planned
from services.executor.model.loader import expected_shapes, open_model
from services.gateway.tokenizer import load_tokenizer
from shared.model_source import find_model
from tests.gateway import tiny_models

HIDDEN, INNER, HEADS = 32, 64, 4
Q4_1 = gguf.GGMLQuantizationType.Q4_1


class WithWeights(gguf.GGUFWriter):
    """Adds a layer of random quantised weights just before the header is written."""

    def write_header_to_file(self, path=None):
        dice = np.random.default_rng(0)
        self.add_context_length(64)
        self.add_embedding_length(HIDDEN)
        self.add_block_count(1)
        self.add_feed_forward_length(INNER)
        self.add_head_count(HEADS)
        self.add_layer_norm_rms_eps(1e-5)
        self.add_rope_freq_base(100_000.0)
        vocabulary = 2 + 256 + 4
        matrices = {
            "token_embd": (vocabulary, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN),
            "blk.0.attn_k": (HIDDEN, HIDDEN), "blk.0.attn_v": (HIDDEN, HIDDEN),
            "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (INNER, HIDDEN),
            "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        for name, shape in matrices.items():
            numbers = dice.standard_normal(shape, dtype=np.float32)
            self.add_tensor(f"{name}.weight", gguf.quantize(numbers, Q4_1), raw_dtype=Q4_1)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            self.add_tensor(f"{name}.weight", dice.standard_normal(HIDDEN, dtype=np.float32))
        super().write_header_to_file(path)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """(a quantised GGUF file, where its other forms go)."""
    monkeypatch.setattr(tiny_models, "GGUFWriter", WithWeights)
    return tiny_models.gguf(tmp_path), tmp_path / "forms"


def numbers_of(path):
    """All tensors as they are when loaded in bf16."""
    with ExitStack() as files:
        config, tensors = open_model(find_model(str(path)), files)
        loaded = {}
        for name, shape in expected_shapes(config).items():
            loaded[name] = torch.empty(shape, dtype=torch.bfloat16)
            tensors.read_into(name, loaded[name])
    return config, loaded


def test_every_form_holds_the_same_numbers(tiny):
    source, into = tiny
    weights = weights_of(str(source), into)
    config, original = numbers_of(source)
    for path in (weights.folder(), weights.gguf("BF16"), weights.gguf("F16")):
        again, numbers = numbers_of(path)
        assert again == config
        assert all(torch.equal(numbers[name], original[name]) for name in original), path


def test_no_matrix_stays_quantised(tiny):
    source, into = tiny
    reader = gguf.GGUFReader(weights_of(str(source), into).gguf("BF16"))
    kinds = {len(tensor.shape): tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {1: "F32", 2: "BF16"}


def test_all_that_the_file_said_is_still_said(tiny):
    source, into = tiny
    before = gguf.GGUFReader(source).fields
    after = gguf.GGUFReader(weights_of(str(source), into).gguf("BF16")).fields
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.file_type"}
    assert set(after) - own == set(before) - own
    assert all(after[name].contents() == before[name].contents() for name in set(before) - own)


def test_transformers_reads_the_folder(tiny):
    source, into = tiny
    folder = weights_of(str(source), into).folder()
    config = AutoConfig.from_pretrained(folder)
    assert (config.rope_parameters["rope_theta"], config.eos_token_id) == (100_000.0, 1)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(find_model(str(source)))
    text = "abc a 1234 and more"
    assert theirs(text)["input_ids"] == list(ours.encode(text, add_special_tokens=True))
    asked = [{"role": "user", "content": "abc"}]
    assert theirs.apply_chat_template(asked, tokenize=False) == "<s>abc"


def test_what_is_written_is_not_written_again(tiny):
    source, into = tiny
    weights = weights_of(str(source), into)
    times = [path.stat().st_mtime_ns for path in (weights.folder(), weights.gguf("F16"))]
    again = weights_of(str(source), into)
    assert [path.stat().st_mtime_ns for path in (again.folder(), again.gguf("F16"))] == times


def test_only_a_gguf_file_can_be_written_so(tmp_path):
    with pytest.raises(SystemExit, match="only a GGUF file"):
        weights_of("toy", tmp_path)


def test_transformers_generates_a_static_batch_of_them(tiny, tmp_path):
    source, into = tiny
    plans = [
        Planned(({"role": "user", "content": text},), max_tokens=count, prompt_tokens=2)
        for text, count in (("abc", 3), ("a 12 abc", 5))
    ]
    runner = OfflineRunner(weights_of(str(source), into), tmp_path)
    runner.start()
    try:
        assert runner.is_alive()
        measured = runner.measure(Load(CELLS["A8"], [], plans, []))
        sampled = [replace(plan, num_choices=4, temperature=0.8) for plan in plans]
        assert runner.measure(Load(CELLS["C"], [], sampled, [])).tokens_per_s > 0
    finally:
        runner.stop()
    assert not runner.is_alive()
    assert measured.tokens_per_s > 0
    assert (measured.ttft_ms, measured.failed) == (None, 0)
