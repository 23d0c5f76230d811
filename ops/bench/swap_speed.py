"""Swapping a request out and in against computing it again, over block sizes: figure 19.

    python -m ops.bench.swap_speed [--tokens 256] [--block-sizes 1,2,4] [--json F] [--plot F]

The executor's own hands (`Interpreter.run`: plan check, moves, forward pass) on the real model,
over scattered blocks. Each round does all of it once for every block size, so that whatever else
the machine does hits all alike; read the medians. Between two swaps lies a forward pass, so that no
block is still in the processor's cache.

Floor and prediction, written before measuring (SmolLM2-135M, bfloat16, 2 cores of Zen 4, 256
tokens). A swap reads and writes 256 x 23,040 bytes; at 48 GB/s that is 0.25 ms each way. Computing
them again is 2 x 106 million weights x 256 operations; at 422 GFLOP/s that is 129 ms. Predicted:
0.5 ms each way at every block size, since a block is one run of memory and all of a plan are moved
by one call, and 170 ms: swapping wins by two orders of magnitude. In the paper (a GPU behind PCIe,
one transfer a block and layer) it loses at small blocks.
Source: Kwon et al. 2023, section 7.3.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.config import LlamaConfig
from services.executor.model.llama import Llama
from services.executor.model.loader import load_model, open_model
from shared.geometry import blocks_in
from shared.ids import BlockId, Boot, SequenceId
from shared.messages import Move, Row, Sample, StepPlan, StepResult
from shared.model_source import DEFAULT_MODEL, find_model
from shared.sampling import DrawParams

BLOCK_SIZES = "1,2,4,8,16,32,64,128"
BANDWIDTH_GB_S, PEAK_GFLOP_S = 48.0, 422.0  # docs/experiments.md, the machine there when quiet


@dataclass(frozen=True)
class Medians:
    """Milliseconds of one block size."""

    block_size: int
    blocks: int
    swap_out_ms: float
    swap_in_ms: float
    plain_copy_ms: float
    recompute_ms: float

    @property
    def ratio(self) -> float:
        """How many times longer computing takes than leaving and coming back."""
        return self.recompute_ms / (self.swap_out_ms + self.swap_in_ms)


class Bench:
    """One block size: pools, hands, and a request in scattered blocks."""

    def __init__(self, model: Llama, block_size: int, num_tokens: int) -> None:
        self._num_blocks = blocks_in(num_tokens, block_size)
        self._pools = KVPools(model, 2 * self._num_blocks, block_size, 2 * self._num_blocks)
        for pool in (self._pools.gpu, self._pools.cpu):
            pool.zero_()  # so that it is memory, as it is after a while of serving
        self._interpreter = Interpreter(model, self._pools, max_model_len=num_tokens)
        self._tokens = tuple(7 * i % model.shape.vocab_size for i in range(num_tokens))
        self._steps = 0
        self.block_size = block_size
        self.times: dict[str, list[float]] = {
            name: [] for name in ("recompute", "swap_out", "swap_in", "plain_copy")
        }

    def round(self) -> None:
        """Compute the request, let it leave, come back to other blocks; and a plain copy."""
        here, there, back = (self._places() for _ in range(3))
        self.compute(here)
        self.time("swap_out", lambda: self._run(swap_out=_moves(here, there)))
        self.compute(here)  # only to clear the cache
        self.time("swap_in", lambda: self._run(swap_in=_moves(there, back)))
        self.compute(back)
        source, destination = (
            pool[: self._num_blocks] for pool in (self._pools.gpu, self._pools.cpu)
        )
        self.time("plain_copy", lambda: destination.copy_(source))

    def compute(self, table: tuple[int, ...]) -> None:
        """All tokens in one step, and the draw of the next."""
        draw = Sample(SequenceId(1), 0, 0, DrawParams(temperature=0.0))
        row = Row(SequenceId(1), self._tokens, 0, table, (draw,))
        self.time("recompute", lambda: self._run(rows=(row,)))

    def time(self, name: str, run: Callable[[], object]) -> None:
        """Note how long it takes."""
        started = time.perf_counter()
        run()
        self.times[name].append(time.perf_counter() - started)

    def medians(self) -> Medians:
        """Of all rounds so far."""
        ms = {name: 1e3 * statistics.median(times) for name, times in self.times.items()}
        return Medians(
            *(self.block_size, self._num_blocks, ms["swap_out"], ms["swap_in"]),
            *(ms["plain_copy"], ms["recompute"]),
        )

    def _places(self) -> tuple[int, ...]:
        return tuple(random.sample(range(2 * self._num_blocks), self._num_blocks))

    def _run(self, **parts: Any) -> None:
        self._steps += 1
        plan = StepPlan(Boot(0), self._steps, **{"rows": (), **parts})
        result = self._interpreter.run(plan)
        if not isinstance(result, StepResult) or result.row_errors:
            raise SystemExit(f"the step failed: {result}")


def _moves(sources: tuple[int, ...], destinations: tuple[int, ...]) -> tuple[Move, ...]:
    pairs = zip(sources, destinations, strict=True)
    return tuple(Move(BlockId(source), BlockId(destination)) for source, destination in pairs)


def floors_ms(model: Llama, config: LlamaConfig, num_tokens: int) -> tuple[float, float]:
    """(one swap each way, one recompute) at the bandwidth and peak of docs/experiments.md."""
    moved_bytes = 2 * 2 * num_tokens * model.kv_bytes_per_token  # read and written, out and in
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = config.num_layers * config.hidden_size * (
        attention + config.num_heads * config.head_dim + 3 * config.intermediate_size
    )  # fmt: skip
    return moved_bytes / BANDWIDTH_GB_S / 1e6, 2 * weights * num_tokens / PEAK_GFLOP_S / 1e6


def plot(rows: list[Medians], title: str, path: Path) -> None:
    """The figure, logarithmic both ways."""
    from matplotlib.figure import Figure  # only here: pip install '.[plots]'

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes: Any = figure.subplots()
    sizes = [row.block_size for row in rows]
    for label, marker, values in (
        ("recompute", "s", [row.recompute_ms for row in rows]),
        ("swap out + in", "o", [row.swap_out_ms + row.swap_in_ms for row in rows]),
        ("swap out", "^", [row.swap_out_ms for row in rows]),
        ("swap in", "v", [row.swap_in_ms for row in rows]),
        ("plain copy, twice", "", [2 * row.plain_copy_ms for row in rows]),
    ):
        axes.plot(sizes, values, marker=marker, label=label, linestyle="-" if marker else ":")
    axes.set(xlabel="block size, tokens", ylabel="ms", title=title, xscale="log", yscale="log")
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Read the command line, measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=256, help="what the request holds")
    parser.add_argument("--block-sizes", default=BLOCK_SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--plot", type=Path, help="draw them here (.svg, .png); needs matplotlib")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(0)
    source = find_model(options.model)
    model = load_model(
        source, getattr(torch, options.dtype), torch.device("cpu"), lambda phase: None
    )
    with ExitStack() as files:
        config, _ = open_model(source, files)
    benches = [
        Bench(model, size, options.tokens) for size in map(int, options.block_sizes.split(","))
    ]
    for bench in benches:
        bench.compute(tuple(range(blocks_in(options.tokens, bench.block_size))))
        bench.times["recompute"].clear()
    for _ in range(options.rounds):
        for bench in benches:
            bench.round()
    rows = [bench.medians() for bench in benches]
    swap_floor_ms, compute_floor_ms = floors_ms(model, config, options.tokens)
    title = f"{source.name}, {options.dtype}, {options.tokens} tokens, {options.threads} threads"
    print(f"{title}; medians of {options.rounds} rounds, ms")
    print("block size  blocks  swap out  swap in  plain copy  recompute  recompute / swap out + in")
    for row in rows:
        print(
            f"{row.block_size:10d}  {row.blocks:6d}  {row.swap_out_ms:8.2f}  "
            f"{row.swap_in_ms:7.2f}  {row.plain_copy_ms:10.2f}  {row.recompute_ms:9.1f}  "
            f"{row.ratio:10.1f}"
        )
    print(
        f"floor: swap out and in {swap_floor_ms:.2f} ms at {BANDWIDTH_GB_S:g} GB/s, recompute "
        f"{compute_floor_ms:.0f} ms at {PEAK_GFLOP_S:g} GFLOP/s"
    )
    if options.json:
        told = {
            "what": title, "rounds": options.rounds, "swap_floor_ms": swap_floor_ms,
            "recompute_floor_ms": compute_floor_ms,
            "rows": [asdict(row) for row in rows],
            "ms": [{name: [round(1e3 * t, 4) for t in times] for name, times in bench.times.items()}
                   for bench in benches],
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.plot:
        plot(rows, title, options.plot)


if __name__ == "__main__":
    main()
