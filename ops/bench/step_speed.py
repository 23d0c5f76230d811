"""One step of the model alone, in multiples of what the machine allows.

    python -m ops.bench.step_speed [--model M] [--dtype bfloat16] [--threads 2] [--cases 1x256,...]
        [--backends native,native/int8]

A back end is `native`, `vectors` (the same without matrix registers), `numba`, or `native+int8` for
--quantization int8, with a --kv-cache-dtype after a slash if it is not auto.
A case is ROWSxCONTEXT (every row decodes one token) or pCONTEXT (one prompt in one piece). Back
ends take turns, one step each, with rests between, so that whatever else the machine does hits all
of them; the bandwidth and the peaks are measured between the same steps. A round's floor is the
larger of (bytes of weights and cache / its bandwidth) and (products / its peak), with int8 weights
int8's.

Floor, target and result: docs/decisions/0002-the-whole-step-in-native-code.md.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cpu.backend import CpuKernels
from kernels.cpu.memory import advise_huge_pages
from kernels.cpu.native.backend import NativeKernels
from kernels.cpu.native.build import FLAGS, compiler, library
from kernels.cpu.native.library import load as load_library
from kernels.interface import Kernels, PackedBatch
from kernels.select import select_kv_dtype
from services.executor.model.llama import Llama
from services.executor.model.loader import expected_shapes, load_onto
from shared.geometry import blocks_in
from shared.model_source import DEFAULT_MODEL, ModelSource, find_model

BLOCK_SIZE = 16
REST_S = 0.05
READ_BYTES = 256 * 2**20
BACKENDS: dict[str, Callable[[torch.dtype], Kernels]] = {
    "native": NativeKernels,
    "vectors": lambda dtype: NativeKernels(dtype, load_library(str(library(("-mno-amx-bf16",))))),
    "native+int8": lambda dtype: NativeKernels(dtype, quantization="int8"),
    "numba": CpuKernels,
}


@dataclass(frozen=True)
class Case:
    """Rows of one context length, each with some new tokens."""

    name: str
    rows: int
    context: int
    new: int

    @classmethod
    def of(cls, text: str) -> "Case":
        """`32x256` or `p512`."""
        if text.startswith("p"):
            return cls(f"prompt of {text[1:]}", 1, int(text[1:]), int(text[1:]))
        rows, context = map(int, text.split("x"))
        return cls(f"{rows} x {context}", rows, context, 1)

    def batch(self) -> tuple[int, PackedBatch]:
        """Blocks in shuffled order; how many there are."""
        random = torch.Generator().manual_seed(0)
        per_row = blocks_in(self.context, BLOCK_SIZE)
        tables = torch.randperm(self.rows * per_row, generator=random).int().view(self.rows, -1)
        positions = torch.arange(self.context - self.new, self.context).repeat(self.rows)
        owners = torch.arange(self.rows).repeat_interleave(self.new)
        blocks = tables[owners, positions // BLOCK_SIZE].long()
        starts = torch.arange(self.rows + 1) * self.new
        return tables.numel(), PackedBatch(
            token_ids=torch.randint(0, 100, (len(positions),), generator=random),
            positions=positions.int(),
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            row_starts=starts.int(),
            context_lengths=torch.full((self.rows,), self.context, dtype=torch.int32),
            block_tables=tables,
            logit_tokens=starts[1:] - 1,
        )

    def work(self, model: Llama, weights: int, itemsize: int) -> tuple[float, float]:
        """Bytes that must be read and floating point operations that must be done."""
        shape = model.shape
        cached = self.rows * self.context * model.kv_bytes_per_token
        head = shape.vocab_size * shape.hidden_size
        tokens = self.rows * self.new
        products = 2 * (tokens * (weights - head) + self.rows * head)
        seen = self.context - (self.new - 1) / 2
        products += 4 * shape.num_layers * shape.num_heads * shape.head_dim * int(tokens * seen)
        return weights * itemsize + cached, products


class Limits:
    """Reads and multiplies as fast as the machine can, and remembers the best."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self._is_bf16, self._threads = int(dtype == torch.bfloat16), threads
        self._memory = torch.empty(READ_BYTES, dtype=torch.uint8)
        advise_huge_pages(self._memory)
        self._memory.fill_(1)
        source = Path(__file__).with_name("limits.cpp")
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            subprocess.run([*compiler(), *FLAGS, "-o", file.name, str(source)], check=True)
            self._native = ctypes.CDLL(file.name)
        self._native.bytes_per_s.restype = self._native.flops_per_s.restype = ctypes.c_double
        self._native.int8_ops_per_s.restype = ctypes.c_double
        self._native.bytes_per_s.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []

    def measure(self) -> tuple[float, float]:
        """Bytes read a second, operations a second; the better of two each."""
        address = self._memory.data_ptr()
        read = max(self._native.bytes_per_s(address, READ_BYTES, self._threads) for _ in range(2))
        peak = max(self._native.flops_per_s(self._is_bf16, self._threads) for _ in range(2))
        self.bandwidths.append(read)
        self.peaks.append(peak)
        return read, peak

    def measure_int8(self) -> float:
        """Operations on int8 a second; the better of two."""
        return max(self._native.int8_ops_per_s(self._threads) for _ in range(2))


@dataclass(frozen=True)
class Times:
    """Seconds of one case, by model: each round's floor, and the median step in it."""

    floors: dict[str, list[float]]
    steps: dict[str, list[float]]

    def line(self, name: str) -> str:
        """One model's result."""
        steps = self.steps[name]
        floors = self.floors[name]
        ratios = [step / floor for step, floor in zip(steps, floors, strict=True)]
        return (
            f"{name}: {statistics.median(steps) * 1e3:6.1f} (best {min(steps) * 1e3:6.1f}), "
            f"{statistics.median(ratios):.2f} x floor {statistics.median(floors) * 1e3:.1f}"
        )


def time_case(
    models: dict[str, Llama],
    case: Case,
    repeats: int,
    limits: Limits,
    work: dict[str, tuple[float, float]],
) -> Times:
    """Rounds in which every model has its turn."""
    num_blocks, batch = case.batch()
    pools = {name: model.allocate_pool(num_blocks, BLOCK_SIZE) for name, model in models.items()}
    for name, model in models.items():
        pools[name].zero_()
        model.forward(pools[name], batch)
    times = Times({name: [] for name in models}, {name: [] for name in models})
    for _ in range(repeats):
        time.sleep(REST_S)
        read, peak = limits.measure()
        int8_peak = limits.measure_int8() if any(map(has_int8_weights, models)) else peak
        for name, model in models.items():
            num_bytes, products = work[name]
            most = int8_peak if has_int8_weights(name) else peak
            times.floors[name].append(max(num_bytes / read, products / most))
            time.sleep(REST_S)
            steps = []
            for _ in range(3 if case.new == 1 else 1):
                started = time.perf_counter()
                model.forward(pools[name], batch)
                steps.append(time.perf_counter() - started)
            times.steps[name].append(statistics.median(steps))
    return times


def has_int8_weights(name: str) -> bool:
    """If a back end multiplies in int8."""
    return "+int8" in name


def load(name: str, dtype: torch.dtype, source: ModelSource) -> Llama:
    """The model on a back end: `native`, `native/int8`, `native+int8/int8`."""
    backend, _, kv_cache_dtype = name.partition("/")
    kernels = BACKENDS[backend](dtype)
    kv_dtype = select_kv_dtype(kernels, kv_cache_dtype or "auto")
    return load_onto(kernels, source, lambda _: None, kv_dtype)


def main() -> None:
    """Read the command line, time every case, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backends", default="native,numba")
    parser.add_argument("--cases", default="1x256,8x256,32x256,64x256,1x1024,32x1024,p128,p512")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    source = find_model(options.model)
    models = {name: load(name, dtype, source) for name in options.backends.split(",")}
    first = next(iter(models.values()))
    weights = sum(torch.Size(s).numel() for s in expected_shapes(first.config).values())
    limits = Limits(dtype, options.threads)
    print(f"{source.name}, {options.dtype}, {options.threads} threads; ms, medians of rounds")
    for case in map(Case.of, options.cases.split(",")):
        work = {
            name: case.work(model, weights, 1 if has_int8_weights(name) else dtype.itemsize)
            for name, model in models.items()
        }
        times = time_case(models, case, options.repeats, limits, work)
        told = [f"{case.name:14s}"]
        told += [times.line(name) for name in models]
        if len(models) == 2:
            ours, theirs = times.steps.values()
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            told.append(f"{statistics.median(ratios):.2f} times as fast")
        print(" | ".join(told), flush=True)
    for what, values in (("read GB/s", limits.bandwidths), ("peak GFLOP/s", limits.peaks)):
        best, middle = max(values) / 1e9, statistics.median(values) / 1e9
        print(f"{what}: median {middle:.0f}, best {best:.0f}")


if __name__ == "__main__":
    main()
