"""What a model's own files say about its form: `config.json` or GGUF metadata.

Whatever we do not compute exactly is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shared.errors import StartError
from shared.geometry import ModelShape

MODEL_TYPES: Final = ("llama", "mistral", "qwen2")
"""Architectures of one form: RoPE, grouped queries, RMSNorm, gated SiLU (SmolLM is a Llama)."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; the numbers of `config.json` under the same names."""

    kind: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """One model of the Llama family.

    `windows` has, for each layer, how many of the last tokens a query sees, its own included, or
    None for all; it is empty if no layer has a window.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...] = ()

    def window_of(self, layer: int) -> int | None:
        """How many of the last tokens a query of this layer sees; None: all."""
        return self.windows[layer] if self.windows else None

    def without_windows(self) -> "LlamaConfig":
        """For a back end that has none: no longer than the smallest, full attention is the same."""
        longest = min([self.max_position_embeddings, *(w for w in self.windows if w is not None)])
        return replace(self, max_position_embeddings=longest, windows=())

    @property
    def shape(self) -> ModelShape:
        """What memory and kernels need to know."""
        return ModelShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
        )


class _Fields:
    """Typed reading of a mapping; a missing or mistyped field is a StartError that names it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, name: str, if_absent: Any = None) -> Any:
        """The value, None where it is null."""
        return self._values.get(name, if_absent)

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise StartError(f"{self.where}: {name} must be a positive integer, not {value!r:.60}")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer, 0 or more."""
        return 0 if self._values.get(name) == 0 else self.whole(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise StartError(f"{self.where}: {name} must be a positive number, not {value!r:.60}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise StartError(f"{self.where}: {name} must be true or false, not {value!r:.60}")
        return value


def config_from_folder(folder: Path) -> LlamaConfig:
    """Read `config.json` (and eos ids from `generation_config.json`, where there is one).

    Raises: StartError naming the file and the field that is missing, wrong or not supported.
    """
    path = folder / "config.json"
    values = _read_json(path)
    fields = _Fields(values, str(path))
    model_type = fields.get("model_type")
    if model_type not in MODEL_TYPES:
        raise StartError(
            f"{path}: model_type {model_type!r:.60} is not supported; "
            f"this version serves {', '.join(MODEL_TYPES)}"
        )
    if fields.get("quantization_config"):
        raise StartError(f"{path}: quantization_config (quantised weights) is not supported")
    if fields.get("hidden_act") not in (None, "silu", "swish"):
        raise StartError(f"{path}: hidden_act {fields.get('hidden_act')!r} is not supported")
    scaling, theta = _rope(fields)
    heads, hidden_size = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    bias = model_type == "llama" and fields.flag("attention_bias", default=False)
    return _checked(
        LlamaConfig(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=fields.whole("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=fields.whole("head_dim", hidden_size // heads),
            vocab_size=fields.whole("vocab_size"),
            max_position_embeddings=fields.whole("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=fields.flag("tie_word_embeddings", default=False),
            qkv_bias=bias or model_type == "qwen2",
            output_bias=bias,
            mlp_bias=model_type == "llama" and fields.flag("mlp_bias", default=False),
            eos_token_ids=_eos_ids(folder, fields),
            windows=_windows(fields),
        ),
        str(path),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> LlamaConfig:
    """Read GGUF metadata; `shapes` (of its tensors) tell tied heads, biases and vocabulary.

    Raises: StartError naming the key that is missing, wrong or not supported.
    """
    model_type = metadata.get("general.architecture")
    if model_type not in ("llama", "qwen2"):
        raise StartError(
            f"{where}: general.architecture {model_type!r:.60} is not supported; "
            "this version serves llama and qwen2"
        )
    fields = _Fields(metadata, where)
    key = f"{model_type}.".__add__
    if metadata.get(key("expert_count")):
        raise StartError(f"{where}: {key('expert_count')} (mixture of experts) is not supported")
    heads = fields.whole(key("attention.head_count"))
    hidden_size = fields.whole(key("embedding_length"))
    head_dim = fields.whole(key("attention.key_length"), hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(key(name), head_dim) != head_dim:
            raise StartError(f"{where}: {key(name)} other than the head size {head_dim} is not "
                             "supported")  # fmt: skip
    if "token_embd.weight" not in shapes:
        raise StartError(f"{where}: tensor token_embd.weight is missing")
    num_layers = fields.whole(key("block_count"))
    has_window = bool(fields.get(key("attention.sliding_window")))
    window = fields.whole(key("attention.sliding_window")) if has_window else None
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return _checked(
        LlamaConfig(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=fields.whole(key("feed_forward_length")),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=fields.whole(key("attention.head_count_kv"), heads),
            head_dim=head_dim,
            vocab_size=shapes["token_embd.weight"][0],
            max_position_embeddings=fields.whole(key("context_length")),
            rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon")),
            rope_theta=fields.number(key("rope.freq_base"), 10_000.0),
            rope_scaling=_gguf_rope_scaling(fields, key("rope.")),
            tied="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_up.bias" in shapes,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if isinstance(i, int))),
            windows=(window,) * num_layers if window else (),
        ),
        where,
    )


def _checked(config: LlamaConfig, where: str) -> LlamaConfig:
    if config.num_heads % config.num_kv_heads:
        raise StartError(
            f"{where}: {config.num_kv_heads} key-value heads do not divide {config.num_heads} heads"
        )
    if config.head_dim % 8:
        raise StartError(f"{where}: head size {config.head_dim} is not a multiple of 8")
    bad = [i for i in config.eos_token_ids if not 0 <= i < config.vocab_size]
    if bad:
        raise StartError(f"{where}: eos id {bad[0]} is outside the vocabulary")
    return config


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise StartError(f"{path}: is not a JSON object")
    return values


def _windows(fields: _Fields) -> tuple[int | None, ...]:
    """Each layer's sliding window; none at all if no layer has one."""
    num_layers, model_type = fields.whole("num_hidden_layers"), fields.get("model_type")
    windowed = fields.flag("use_sliding_window", default=model_type == "mistral")
    default = None if model_type == "llama" else 4096  # of MistralConfig and Qwen2Config
    if not windowed or fields.get("sliding_window", default) is None:
        return ()
    window, kinds = fields.whole("sliding_window", default), fields.get("layer_types")
    if kinds is None:  # Qwen2's first layers see everything, as in transformers' Qwen2Config
        full = fields.count("max_window_layers", 28) if model_type == "qwen2" else 0
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise StartError(f"{fields.where}: layer_types must name each of {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown or (model_type == "mistral" and "full_attention" in kinds):
        kind = unknown[0] if unknown else "full_attention"
        raise StartError(f"{fields.where}: layer_types {kind!r:.60} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: _Fields) -> tuple[RopeScaling | None, float]:
    """Scaling and base, from `rope_parameters` (transformers 5) or the older two fields."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise StartError(f"{fields.where}: the rope parameters are not a JSON object")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0) or rope.get(
        "partial_rotary_factor"
    ) not in (None, 1, 1.0):
        raise StartError(f"{fields.where}: partial_rotary_factor is not supported")
    inner = _Fields(rope, f"{fields.where}: rope parameters")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, theta
    if kind == "linear":
        return RopeScaling("linear", inner.number("factor")), theta
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.whole("original_max_position_embeddings"),
        )
        return scaling, theta
    raise StartError(
        f"{fields.where}: rope scaling {kind!r:.60} is not supported; linear and llama3 are"
    )


def _gguf_rope_scaling(fields: _Fields, prefix: str) -> RopeScaling | None:
    """As llama.cpp: no type is linear, no factor (or 0) is none, and its old key comes last."""
    kind = fields.get(f"{prefix}scaling.type")
    if kind == "none":
        return None
    if kind not in (None, "linear"):
        raise StartError(
            f"{fields.where}: {prefix}scaling.type {kind!r:.60} is not supported; linear is"
        )
    name = f"{prefix}scaling.factor"
    if fields.get(name) is None:
        name = f"{prefix}scale_linear"
    return RopeScaling("linear", fields.number(name)) if fields.get(name) else None


def _eos_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise StartError(f"{folder}: eos_token_id must be an integer or a list, not {value!r:.60}")
    return tuple(ids)
