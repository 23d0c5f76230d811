"""What --quantization int8 costs in quality: perplexity and agreement with the exact weights.

    python -m ops.bench.weight_quality [--weights float32,bfloat16,bfloat16+int8,bfloat16+int8/int8]
        [--pieces 8] [--length 1024] [--text F]

As ops/bench/kv_quality.py, with other weights over the same text: a --dtype, then a --quantization
after a plus, then a --kv-cache-dtype after a slash. The first of `--weights` is the exact one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.cpu.native.backend import NativeKernels
from kernels.interface import Quantization
from kernels.select import select_kv_dtype
from ops.bench.kv_quality import TEXT, compare, pieces_of
from services.executor.model.llama import Llama
from services.executor.model.loader import expected_shapes, load_onto
from shared.model_source import DEFAULT_MODEL, ModelSource, find_model

COLUMNS = "| weights | MB | perplexity | top-1 | top-1, clear | KL, 1e-3 | logits |"


def loaded(name: str, source: ModelSource) -> Llama:
    """The model in `bfloat16`, `bfloat16+int8` or `bfloat16+int8/int8`."""
    weights, _, kv_cache_dtype = name.partition("/")
    dtype, _, quantization = weights.partition("+")
    kernels = NativeKernels(getattr(torch, dtype), quantization=quantization_of(quantization))
    kv_dtype = select_kv_dtype(kernels, kv_cache_dtype or "auto")
    return load_onto(kernels, source, lambda _: None, kv_dtype)


def quantization_of(name: str) -> Quantization | None:
    """None for nothing. Raises: ValueError for what there is not."""
    if name not in ("", "int8"):
        raise ValueError(f"{name}: weights are quantised as int8 or not at all")
    return "int8" if name else None


def weight_bytes(name: str, model: Llama) -> int:
    """Bytes of the weights that a step reads; in int8 with a float32 scale an output."""
    dtype, is_int8 = getattr(torch, name.split("+")[0].split("/")[0]), "+int8" in name
    total = 0
    for shape in expected_shapes(model.config).values():
        is_matrix = len(shape) == 2
        size = 4 if not is_matrix else 1 if is_int8 else dtype.itemsize
        total += size * torch.Size(shape).numel() + (4 * shape[0] if is_matrix and is_int8 else 0)
    return total


def table(names: Sequence[str], source: ModelSource, pieces: Sequence[Sequence[int]]) -> list[str]:
    """A row for each of `names`."""
    models = {name: loaded(name, source) for name in names}
    found = compare(models, pieces)
    return [
        quality.row(name, round(weight_bytes(name, models[name]) / 1e6))
        for name, quality in found.items()
    ]


def main() -> None:
    """Read the command line, load, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights", default="float32,bfloat16,bfloat16+int8,bfloat16+int8/int8")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()
    source = find_model(options.model)
    try:
        pieces = pieces_of(options.text, source, options.pieces, options.length)
    except ValueError as error:
        parser.error(str(error))
    print(f"{source.name}, {options.pieces} x {options.length} tokens")
    print(COLUMNS)
    print("|---|---|---|---|---|---|---|")
    print("\n".join(table(options.weights.split(","), source, pieces)))


if __name__ == "__main__":
    main()
