"""A small decoder, served through forks, copies and swaps: the tokens are the reference's."""

import torch

from kernels.interface import Kernels
from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import TritonKernels
from ops.gpu.decoder import TINY, random_llama
from ops.gpu.section import Section
from ops.gpu.serving import Hands, Served, Wish, random_prompt, serve
from shared.sampling import DrawParams, SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 8, (10, 12)
"""So few blocks of the pool that somebody is swapped out."""
CPU = torch.device("cpu")


def loop(section: Section, what: str) -> None:
    """Greedy and drawn, one request of two answers, one swapped out and in again."""
    wanted = _served(ReferenceKernels(torch.float32), CPU)
    got = _served(TritonKernels(torch.float32, section.gpu), section.device)
    for (request, sequence), tokens in wanted.tokens.items():
        if got.tokens.get((request, sequence)) != tokens:
            section.fault(what, f"{request}.{sequence}: {got.tokens.get((request, sequence))}, "
                          f"not {tokens}")  # fmt: skip
    counters = got.counters
    if not (counters.cow_copies and counters.swap_out_blocks and counters.swap_in_blocks):
        section.fault(what, f"it had no copy-on-write or no swap: {counters}")
    note = (
        f"the reference's, {len(got.steps)} steps, {counters.cow_copies} copies-on-write, "
        f"{counters.swap_out_blocks} blocks out, {counters.swap_in_blocks} in"
    )
    section.row(what, sum(map(len, wanted.tokens.values())), "tokens", note)


def _served(kernels: Kernels, device: torch.device) -> Served:
    model = random_llama(kernels, TINY, device, made_on=CPU)
    greedy, drawn = DrawParams(temperature=0), DrawParams(temperature=0.9, top_k=30, top_p=0.95)
    wishes = [
        Wish(_prompt(20), SamplingParams(greedy, max_tokens=10)),
        Wish(_prompt(13), SamplingParams(drawn, seed=5, n=2, max_tokens=12)),
        Wish(_prompt(9), SamplingParams(drawn, seed=-7, max_tokens=14)),
    ]
    hands = Hands(model, NUM_BLOCKS, BLOCK_SIZE)
    return serve(hands, wishes, preemption_mode="swap", max_num_batched_tokens=24, watermark=0.0)


def _prompt(length: int) -> tuple[int, ...]:
    return random_prompt(length, TINY.vocab_size, seed=length)
