"""From files to a model in memory: names and shapes checked first, then tensor by tensor."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels.interface import (
    DecoderLayer,
    DecoderWeights,
    Kernels,
    Linear,
    Quantization,
    Vocabulary,
)
from kernels.select import interpreted_kernels, select_kernels, select_kv_dtype
from services.executor.model.config import LlamaConfig, config_from_folder, config_from_gguf
from services.executor.model.gguf_file import GgufFile
from services.executor.model.layers import inverse_frequencies
from services.executor.model.llama import Llama
from services.executor.model.safetensors_file import SafetensorsFolder
from shared.errors import InvariantBroken, StartError
from shared.model_source import ModelSource

CPU: Final = torch.device("cpu")

Progress = Callable[[str], None]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
FINAL_NORM: Final = "model.norm.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"  # GGUF only

_GGUF_NAMES: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


class Tensors(Protocol):
    """Named tensors in files."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy the tensor `name` into `destination`, converting its dtype."""


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    kv_cache_dtype: str = "auto",
    quantization: Quantization | None = None,
    *,
    is_interpreted: bool = False,
) -> Llama:
    """Load the model of `source`; `progress` hears "loading weights 41 %".

    `is_interpreted`: with a GPU's kernels, in Triton's interpreter.

    Raises: StartError naming the file, tensor or field that is missing, wrong or not supported, or
        the device or a dtype that there are no kernels for.
    """
    if is_interpreted:
        kernels = interpreted_kernels(dtype)
    else:
        kernels = select_kernels(device, dtype, quantization)
    kv_dtype = select_kv_dtype(kernels, kv_cache_dtype)
    return load_onto(kernels, source, progress, kv_dtype, device)


def load_onto(
    kernels: Kernels,
    source: ModelSource,
    progress: Progress,
    kv_dtype: torch.dtype | None = None,
    device: torch.device = CPU,
) -> Llama:
    """Load the model of `source` onto a back end, with keys and values in `kv_dtype` or its own.

    Peak memory stays near the size of the weights in its dtype: every tensor is converted by
    pieces and packed, on `device`, before the next is read.
    Raises: StartError as `load_model`.
    """
    with ExitStack() as files:
        config, tensors = open_model(source, files)
        if not kernels.has_windows:
            config = config.without_windows()
        _check_shapes(tensors.shapes, expected_shapes(config), config.tied, str(source.path))
        weights = _Loading(config, tensors, kernels, progress, device).weights()
    return Llama(config, weights, kernels, kv_dtype)


def open_model(source: ModelSource, files: ExitStack) -> tuple[LlamaConfig, Tensors]:
    """A model's form, and its tensors under Hugging Face's names, open until `files` closes.

    Raises: StartError naming the file or field that is wrong or not supported.
    """
    if source.kind == "gguf":
        gguf_file = files.enter_context(GgufFile(source.path))
        config = config_from_gguf(gguf_file.metadata, gguf_file.shapes, str(source.path))
        return config, _HuggingFaceNames(gguf_file, config)
    if source.kind == "folder":
        config = config_from_folder(source.path)
        return config, files.enter_context(SafetensorsFolder(source.path))
    raise InvariantBroken(f"a {source.kind} model has no weights to load")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a model of this form has, under Hugging Face's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    tied: bool,
    where: str,
) -> None:
    """Refuse missing, extra and misshapen tensors by name."""
    ignored = {ROPE_DIVISORS, HEAD} if tied else {ROPE_DIVISORS}
    missing = [name for name in expected if name not in found]
    extra = [
        name
        for name in found
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    for what, names in (("is missing", missing), ("is not part of this model", extra)):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise StartError(f"{where}: tensor {names[0]}{others} {what}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise StartError(f"{where}: tensor {name} has shape {found[name]}, not {shape}")


class _Loading:
    """One pass over a model's tensors."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Tensors,
        kernels: Kernels,
        progress: Progress,
        device: torch.device,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._shapes = tensors.shapes
        self._kernels = kernels
        self._progress = progress
        self._device = device
        self._total = sum(torch.Size(s).numel() for s in expected_shapes(config).values())
        self._done = 0
        self._percent = -1

    def weights(self) -> DecoderWeights:
        """Everything, packed."""
        config = self._config
        divisors = self._tensor([ROPE_DIVISORS]).cpu() if ROPE_DIVISORS in self._shapes else None
        embedding = self._vocabulary(EMBEDDING)
        head = embedding if config.tied else self._vocabulary(HEAD)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        _return_free_memory()
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._tensor([FINAL_NORM]),
            head=head,
            inverse_frequencies=inverse_frequencies(config, divisors).to(self._device),
        )

    def _layer(self, index: int) -> DecoderLayer:
        _return_free_memory()
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{part}_proj" for part in "qkv"]
        return DecoderLayer(
            input_norm=self._tensor([f"{prefix}input_layernorm.weight"]),
            qkv=self._linear(qkv),
            output=self._linear([f"{attention}o_proj"]),
            post_norm=self._tensor([f"{prefix}post_attention_layernorm.weight"]),
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"]),
            down=self._linear([f"{mlp}down_proj"]),
            window=self._config.window_of(index),
        )

    def _vocabulary(self, name: str) -> Vocabulary:
        return self._kernels.pack_vocabulary(self._tensor([name], self._kernels.dtype))

    def _linear(self, names: Sequence[str]) -> Linear:
        """Matrices of equal width as one, stacked by rows."""
        dtype = self._kernels.dtype
        weight = self._tensor([f"{name}.weight" for name in names], dtype)
        has_bias = f"{names[0]}.bias" in self._shapes
        bias = self._tensor([f"{name}.bias" for name in names], dtype) if has_bias else None
        return self._kernels.pack_linear(weight, bias)

    def _tensor(self, names: Sequence[str], dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensors stacked along their first dimension."""
        rows = [self._shapes[name][0] for name in names]
        stacked = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=dtype)
        for name, part in zip(names, torch.split(stacked, rows), strict=True):
            self._tensors.read_into(name, part)
            self._done += part.numel()
        percent = min(100, 100 * self._done // self._total)
        if percent != self._percent:
            self._percent = percent
            self._progress(f"loading weights {percent} %")
        return stacked.to(self._device)


def _return_free_memory() -> None:
    """Give pages that glibc keeps for later back to the system: packing leaves many behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _HuggingFaceNames:
    """A GGUF file's tensors under Hugging Face's names and order of rows."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file = file
        self._config = config
        names = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight",
                 HEAD: "output.weight"}  # fmt: skip
        for layer in range(config.num_layers):
            for ours, theirs in _GGUF_NAMES.items():
                for kind in ("weight", "bias"):
                    names[f"model.layers.{layer}.{ours}.{kind}"] = f"blk.{layer}.{theirs}.{kind}"
        self._names = {ours: theirs for ours, theirs in names.items() if theirs in file.shapes}
        known = set(self._names.values())
        self._names.update({name: name for name in file.shapes if name not in known})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape; one we have no name for keeps its own."""
        shapes = self._file.shapes
        return {ours: shapes[theirs] for ours, theirs in self._names.items()}

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy a tensor; Llama's query and key rows go back from interleaved to half rotation."""
        self._file.read_into(self._names[name], destination)
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        part = name.split(".")[-2]
        if self._config.model_type == "llama" and part in heads:
            pairs = (heads[part], self._config.head_dim // 2, 2, -1)
            destination.copy_(destination.view(pairs).transpose(1, 2).reshape(destination.shape))
