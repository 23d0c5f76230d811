"""Decode end to end: the scheduler's core and the executor in one process, against the byte floor.

A step cannot be faster than its weights and its keys and values can be read, at the rate at which
this GPU copies. Llama-2-7B's shapes, random weights, random prompts.
"""

import gc
from itertools import pairwise
from typing import Final

import torch

from kernels.triton_gpu.backend import TritonKernels
from ops.gpu.ceilings import COPY
from ops.gpu.decoder import LLAMA_2_7B, TINY, random_llama, step_bytes
from ops.gpu.section import Section
from ops.gpu.serving import Hands, Served, Step, Wish, random_prompt, serve, streams_of
from services.executor.model.llama import Llama
from shared.geometry import blocks_in
from shared.sampling import DrawParams, SamplingParams

BATCHES: Final = (64, 1, 16)
TARGET_TIMES_FLOOR: Final = 1.3
TARGET_IDLE_PERCENT: Final = 2.0
BLOCK_SIZE: Final = 16
_WARM_UP: Final = 8
"""First decode steps that are not counted: kernels are compiled, graphs captured."""
_SPARE_BYTES: Final = 3 * 2**30
"""For activations, logits and graphs."""


def run(section: Section) -> None:
    """One model, one batch after the other, the one a promise was made about first."""
    config = TINY if section.is_dry else LLAMA_2_7B
    kernels = TritonKernels(torch.bfloat16, section.gpu)
    model = random_llama(kernels, config, section.device)
    batches = (2, 1) if section.is_dry else BATCHES
    for batch, has_graphs in [*((batch, True) for batch in batches), (1, False)]:
        what = f"batch {batch}" + ("" if has_graphs else " without graphs")
        if section.has_time(what):
            with section.guarded(what):
                _batch(section, what, model, batch, (batch,) if has_graphs else ())
        gc.collect()
        if section.device.type == "cuda":
            torch.cuda.empty_cache()


def _batch(
    section: Section, what: str, model: Llama, batch: int, graph_rows: tuple[int, ...]
) -> None:
    """Serve `batch` requests, and tell about the steps in which all of them decode."""
    context, num_tokens = (20, 10) if section.is_dry else (1024, 64)
    before = context - num_tokens // 2
    num_blocks = batch * blocks_in(before + num_tokens + 1, BLOCK_SIZE) + 1
    pool_bytes = num_blocks * BLOCK_SIZE * model.kv_bytes_per_token
    if section.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(section.device)
        if pool_bytes > free - _SPARE_BYTES:
            why = f"its keys and values take {pool_bytes / 1e9:.1f} GB, {free / 1e9:.1f} are free"
            section.left_out(what, why)
            return
    draw = DrawParams(temperature=0.8, top_p=1.0 if section.is_dry else 0.95)
    wishes = [
        Wish(
            random_prompt(before, model.shape.vocab_size, seed),
            SamplingParams(draw, seed=seed, max_tokens=num_tokens),
        )
        for seed in range(batch)
    ]
    streams = streams_of(section.device)
    hands = Hands(model, (num_blocks, 0), BLOCK_SIZE, streams, graph_rows)
    served = serve(
        hands, wishes, enable_prefix_caching=False, max_num_batched_tokens=4096, plans_in_flight=2,
        watermark=0.0,
    )  # fmt: skip
    if graph_rows and hands.runner is not None and not hands.runner.graphs.num_replayed:
        section.fault(what, "no step was a graph's")
    short = [name for name, tokens in served.tokens.items() if len(tokens) != num_tokens]
    if short or len(served.tokens) != batch:
        section.fault(what, f"{len(served.tokens)} answers of {batch}, too short: {short[:3]}")
    _tell(section, what, _decodes(served, batch), model)


def _decodes(served: Served, batch: int) -> list[Step]:
    """The steps in which all of them decode, without the first ones and the last."""
    steps = [step for step in served.steps if step.is_decode and step.num_rows == batch]
    return steps[min(_WARM_UP, len(steps) // 3) : -2]


def _tell(section: Section, what: str, steps: list[Step], model: Llama) -> None:
    count = len(steps) - 1
    if count < 1:
        section.fault(what, f"{len(steps)} steps in which all decode: nothing to measure")
        return
    batch = steps[0].num_rows
    step_s = steps[-1].ended.seconds_since(steps[0].ended) / count
    idle_s = sum(after.begun.seconds_since(step.ended) for step, after in pairwise(steps)) / count
    idle = 100 * idle_s / step_s
    section.row(f"{what}: a step", 1e3 * step_s, "ms", f"{batch / step_s:,.0f} tokens/s")
    for part in ("forward_s", "sample_s"):
        part_s = sum(getattr(step.timings, part) for step in steps[1:]) / count
        section.row(f"{what}: {part.removesuffix('_s')}", 1e3 * part_s, "ms")
    section.row(f"{what}: idle between steps", idle, "%", f"over {count} steps")
    if what == "batch 64":
        section.target(
            f"idle between steps at {what}", idle, "%", TARGET_IDLE_PERCENT,
            is_met=idle < TARGET_IDLE_PERCENT,
        )  # fmt: skip
    copy = section.ceilings.get(COPY)
    if not copy:
        section.left_out(f"{what}: floor", f"{COPY} was not measured")
        return
    num_keys = sum(step.num_keys for step in steps[1:]) / count
    floor_bytes = step_bytes(model.config, 2) + num_keys * model.kv_bytes_per_token
    floor_s = floor_bytes / (copy * 1e9)
    section.row(f"{what}: floor", 1e3 * floor_s, "ms", f"{floor_bytes / 1e9:.1f} GB read")
    section.row(f"{what}: times the floor", step_s / floor_s, "")
    if what != f"batch {batch}":
        return
    section.target(
        f"a decode step at {what}", step_s / floor_s, "floors", TARGET_TIMES_FLOOR,
        is_met=step_s <= TARGET_TIMES_FLOOR * floor_s,
    )  # fmt: skip
