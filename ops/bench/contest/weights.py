"""The default model's weights, dequantised to bf16, in the forms that other servers read.

    python -m ops.bench.contest.weights [--model M] [--into FOLDER]

A Hugging Face folder (config.json, model.safetensors, tokenizer) and GGUF files, each written once.
Splitflap rounds the same numbers to bf16 when it loads the file, so all compute with one model.
"""

import argparse
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from services.executor.model.config import LlamaConfig
from services.executor.model.loader import expected_shapes, open_model
from services.gateway.gguf_tokenizer import from_gguf
from shared.gguf_header import read_header
from shared.model_source import DEFAULT_MODEL, find_model


@dataclass(frozen=True)
class Weights:
    """One model's numbers, in each form written when it is first asked for."""

    source: Path  # a GGUF file
    into: Path

    def folder(self) -> Path:
        """A Hugging Face folder in bf16."""
        folder = self.into / "hf"
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write_folder(self.source, folder)
        return folder

    def gguf(self, kind: str) -> Path:
        """A GGUF file; `kind` is BF16, or F16 of the same numbers for readers that know no bf16."""
        path = self.into / f"{kind.lower()}.gguf"
        if not path.exists():
            self.into.mkdir(parents=True, exist_ok=True)
            half_written = path.with_suffix(".part")
            _write_gguf(self.source, half_written, gguf.GGMLQuantizationType[kind])
            half_written.rename(path)
        return path


def default_folder() -> Path:
    """Where they are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "splitflap" / "bench"


def weights_of(model: str, into: Path) -> Weights:
    """The weights of `model`, a GGUF file or a name that means one; written below `into`."""
    source = find_model(model)
    if source.kind != "gguf":
        raise SystemExit(f"--model {model}: only a GGUF file can be written in other forms")
    return Weights(source.path, into / source.name)


def _write_folder(path: Path, folder: Path) -> None:
    """The config comes last: it says that the folder is whole."""
    with ExitStack() as files:
        config, tensors = open_model(find_model(str(path)), files)
        numbers = {}
        for name, shape in expected_shapes(config).items():
            numbers[name] = torch.empty(shape, dtype=torch.bfloat16)
            tensors.read_into(name, numbers[name])
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = read_header(path).metadata
    tokenizer = from_gguf(path)
    tokenizer._core.save(str(folder / "tokenizer.json"))  # no other way to the library's own object
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
    }
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": config.max_position_embeddings,
        "pad_token": named["eos_token"],
        **named,
    }
    _write_json(folder / "tokenizer_config.json", told)
    eos, bos = list(config.eos_token_ids), metadata["tokenizer.ggml.bos_token_id"]
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos[0], "pad_token_id": eos[0]},
    )
    _write_json(folder / "config.json", _config(config, bos))


def _config(config: LlamaConfig, bos: int) -> dict[str, object]:
    """As Hugging Face writes it, with the field names that older and newer readers want."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": bos,
        "eos_token_id": config.eos_token_ids[0],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _write_gguf(source: Path, path: Path, matrices: gguf.GGMLQuantizationType) -> None:
    """The same file, matrices rounded to bf16, vectors in float32 as llama.cpp has them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{matrices.name}"]))
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    bf16, f32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        numbers = numbers.reshape([int(length) for length in reversed(tensor.shape)])
        kind = matrices if numbers.ndim > 1 else f32
        if kind is not f32:
            numbers = gguf.dequantize(gguf.quantize(numbers, bf16), bf16)
        writer.add_tensor(tensor.name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Read the command line, write, say where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=default_folder())
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    weights = weights_of(options.model, options.into)
    print(weights.folder(), weights.gguf("BF16"), weights.gguf("F16"), sep="\n")


if __name__ == "__main__":
    main()
