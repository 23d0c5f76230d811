"""What the draws of a step cost: C++ and NumPy, by kind of draw and number of rows.

    python -m ops.bench.sample_speed [--threads 2] [--vocab-size 49152] [--rounds 15]

Median and least milliseconds of `Sampler.draw` (of `read_out` for beams), back ends in turns. The
logits are normal with a standard deviation of 3, so about 2,000 of 49,152 tokens hold 0.9 of the
mass: many more than after most texts.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from kernels.cpu.native.drawing import NativeDraws
from services.executor.native_drawing import NativeDrawing
from services.executor.numpy_drawing import NumpyDrawing
from services.executor.readout import read_out
from services.executor.sampler import Draw, Sampler
from shared.messages import Row, Sample
from shared.sampling import DrawParams

NUM_HISTORY: Final = 400
KINDS: Final = {
    "greedy": DrawParams(temperature=0.0),
    "temperature": DrawParams(temperature=0.8),
    "top-k 50": DrawParams(temperature=0.8, top_k=50),
    "top-p 0.9": DrawParams(top_p=0.9),
    "min-p 0.05": DrawParams(min_p=0.05),
    "penalties": DrawParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1),
}


def main() -> None:
    """Print one line a kind of draw and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    samplers = {"native": Sampler(NativeDrawing(NativeDraws())), "numpy": Sampler(NumpyDrawing())}
    random = np.random.default_rng(0)
    print(f"{'':14}{'rows':>6}" + "".join(f"{name:>10}{'least':>8}" for name in samplers))
    for kind in [*KINDS, "beam, 5 best"]:
        for num_rows in (1, 8, 32):
            logits = (random.standard_normal((num_rows, asked.vocab_size)) * 3).astype(np.float32)
            work = {name: work_of(kind, sampler, logits) for name, sampler in samplers.items()}
            spent = in_turns(work, asked.rounds).values()
            told = "".join(f"{median(times):10.2f}{min(times):8.2f}" for times in spent)
            print(f"{kind:14}{num_rows:6}{told}")


def work_of(kind: str, sampler: Sampler, logits: np.ndarray[Any, Any]) -> Callable[[], object]:
    """What is timed: one draw of each row."""
    if kind not in KINDS:
        reports = [Sample(i, 0, 0, None, num_top=5) for i in range(len(logits))]
        rows = [Row(i, (0,), 0, (i,), (ask,)) for i, ask in enumerate(reports)]
        return lambda: read_out(sampler, rows, logits, {})
    params = KINDS[kind]
    history = tuple(range(100, 100 + NUM_HISTORY)) if params.needs_history else ()
    num_prompt = len(history) // 2
    draws = [
        Draw(i, NUM_HISTORY, Sample(i, 0, i, params, history, num_prompt))
        for i in range(len(logits))
    ]
    return lambda: sampler.draw(logits, draws)


def in_turns(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other, `rounds` times; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for counts in [False, *[True] * rounds]:
        for name, function in work.items():
            began = time.perf_counter()
            function()
            if counts:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


if __name__ == "__main__":
    main()
