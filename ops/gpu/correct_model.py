"""A small decoder, served through forks, copies and swaps: the tokens are the reference's."""

import torch

from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import TritonKernels
from ops.gpu.decoder import TINY, random_llama
from ops.gpu.section import Section
from ops.gpu.serving import Hands, Served, Wish, random_prompt, serve, streams_of
from shared.sampling import DrawParams, SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 8, (10, 12)
"""So few blocks of the pool that somebody is swapped out."""
CPU = torch.device("cpu")


def loop(section: Section, what: str) -> None:
    """Greedy and drawn, one request of two answers, one swapped out and in again."""
    reference = random_llama(ReferenceKernels(torch.float32), TINY, CPU)
    wanted = _served(Hands(reference, NUM_BLOCKS, BLOCK_SIZE))
    kernels = TritonKernels(torch.float32, section.gpu)
    model = random_llama(kernels, TINY, section.device, made_on=CPU)
    streams = streams_of(section.device)
    for name, graph_rows in (("eager", ()), ("by graphs", (4,))):
        with section.guarded(f"{what}, {name}"):  # a broken request ends it too, and no other
            hands = Hands(model, NUM_BLOCKS, BLOCK_SIZE, streams, graph_rows)
            _compare(section, f"{what}, {name}", hands, wanted)


def _compare(section: Section, what: str, hands: Hands, wanted: Served) -> None:
    got = _served(hands)
    for name, tokens in wanted.tokens.items():
        if got.tokens.get(name) != tokens:
            section.fault(what, f"answer {name}: {got.tokens.get(name)}, not {tokens}")
    counters = got.counters
    if not (counters.cow_copies and counters.swap_out_blocks and counters.swap_in_blocks):
        section.fault(what, f"it had no copy-on-write or no swap: {counters}")
    num_replayed = hands.runner.graphs.num_replayed if hands.runner is not None else 0
    if hands.runner is not None and bool(num_replayed) != bool(hands.runner.graphs.bounds):
        section.fault(what, f"{num_replayed} steps were graphs")
    note = (
        f"the reference's; {len(got.steps)} steps, {num_replayed} of them graphs, "
        f"{counters.cow_copies} copies-on-write, {counters.swap_out_blocks} blocks out, "
        f"{counters.swap_in_blocks} in"
    )
    section.row(what, sum(map(len, wanted.tokens.values())), "tokens", note)


def _served(hands: Hands) -> Served:
    greedy, drawn = DrawParams(temperature=0), DrawParams(temperature=0.9, min_p=0.02)
    wishes = [
        Wish(_prompt(20), SamplingParams(greedy, max_tokens=10)),
        Wish(_prompt(13), SamplingParams(drawn, seed=5, n=2, max_tokens=12)),
        Wish(_prompt(9), SamplingParams(drawn, seed=-7, max_tokens=14)),
    ]
    return serve(hands, wishes, preemption_mode="swap", max_num_batched_tokens=24, watermark=0.0)


def _prompt(length: int) -> tuple[int, ...]:
    return random_prompt(length, TINY.vocab_size, seed=length)
