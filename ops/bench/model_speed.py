"""Decode speed of the model alone: our paged step against transformers' own `generate`.

    python ops/bench/model_speed.py [--model M] [--dtype bfloat16] [--threads 2] [--batches 1,32]

Both models stand in one process with the same weights, dtype and threads, and take turns, so that
whatever else the machine does hits both; read the ratios, then the medians. A run makes
`--new-tokens` greedy tokens for each of B random prompts of `--prompt-tokens`; the decode step is
(a run - a run of one token) / (new tokens - 1).

Floor and prediction, written before measuring (SmolLM2-135M, bfloat16, 2 cores of Zen 4, context
about 200). Floor: the bytes of weights and cache at 48 GB/s, the products at 422 GFLOP/s: 5.7 ms at
batch 1, 21 ms at 32. Predicted: 8 ms and
36 ms, that is 4 and 3 times transformers. Measured with numba's machine code, then the only back
end of a CPU, on a machine that gave only 28 GB/s and 170 GFLOP/s at the time (floor 10 ms and
30 ms): 12.7 ms and 49 ms, 3.0 and 3.4 times transformers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from kernels.interface import PackedBatch
from services.executor.model.llama import Llama
from services.executor.model.loader import expected_shapes, load_model, open_model
from shared.geometry import blocks_in
from shared.model_source import DEFAULT_MODEL, ModelSource, find_model

BLOCK_SIZE = 16


def paged_run(model: Llama, prompts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Greedy tokens [B, num_tokens] of `prompts` [B, length], block tables shuffled."""
    batch_size, length = prompts.shape
    per_row = blocks_in(length + num_tokens, BLOCK_SIZE)
    pool = model.allocate_pool(batch_size * per_row, BLOCK_SIZE)
    tables = torch.randperm(batch_size * per_row).int().view(batch_size, per_row)
    made = [prompts]
    start = 0
    for _ in range(num_tokens):
        new = made[-1]
        count = new.shape[1]
        positions = torch.arange(start, start + count).repeat(batch_size)
        rows = torch.arange(batch_size).repeat_interleave(count)
        blocks = tables[rows, positions // BLOCK_SIZE].long()
        row_starts = torch.arange(batch_size + 1) * count
        logits = model.forward(
            pool,
            PackedBatch(
                token_ids=new.flatten(),
                positions=positions.int(),
                slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
                row_starts=row_starts.int(),
                context_lengths=torch.full((batch_size,), start + count, dtype=torch.int32),
                block_tables=tables,
                logit_tokens=row_starts[1:] - 1,
            ),
        )
        made.append(logits.argmax(-1, keepdim=True))
        start += count
    return torch.cat(made[1:], dim=1)


def transformers_run(model: Any, prompts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The same by `generate`, which may not stop early."""
    with torch.inference_mode():
        made: torch.Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
    return made[:, prompts.shape[1] :]


def load_transformers(source: ModelSource, dtype: torch.dtype) -> Any:
    """transformers' model of the same files."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if source.kind == "folder":
        return AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype).eval()
    with ExitStack() as files:
        config, tensors = open_model(source, files)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                vocab_size=config.vocab_size,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=config.tied,
            )
        ).to(dtype)
        parameters = model.state_dict()
        for name in expected_shapes(config):
            tensors.read_into(name, parameters[name])
    model.tie_weights()
    return model.eval()


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(
    ours: Llama, theirs: Any, batch_size: int, prompt_tokens: int, new_tokens: int, repeats: int
) -> None:
    """Run both in turns and print medians and ratios."""
    random = torch.Generator().manual_seed(0)
    vocab = ours.shape.vocab_size
    prompts = torch.randint(vocab, (batch_size, prompt_tokens), generator=random)
    runs: dict[str, Callable[[int], object]] = {
        "splitflap": lambda count: paged_run(ours, prompts, count),
        "transformers": lambda count: transformers_run(theirs, prompts, count),
    }
    whole: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(2)
    for _ in range(repeats):
        for name, run in runs.items():
            first[name].append(seconds(partial(run, 1)))
            whole[name].append(seconds(partial(run, new_tokens)))
    rates, steps = {}, {}
    for name in runs:
        total, one = statistics.median(whole[name]), statistics.median(first[name])
        rates[name] = batch_size * new_tokens / total
        steps[name] = (total - one) / (new_tokens - 1)
        best = (min(whole[name]) - min(first[name])) / (new_tokens - 1)
        print(
            f"batch {batch_size:3d}  {name:12s}  {rates[name]:7.1f} tokens/s with prefill, "
            f"first token {one * 1e3:6.0f} ms, decode step {steps[name] * 1e3:6.1f} ms "
            f"(best {best * 1e3:.1f})"
        )
    print(
        f"batch {batch_size:3d}  ratio: {rates['splitflap'] / rates['transformers']:.2f} x "
        f"tokens/s, {steps['transformers'] / steps['splitflap']:.2f} x in the decode step"
    )


def main() -> None:
    """Read the command line and compare at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--prompt-tokens", type=int, default=168)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    source = find_model(options.model)
    ours = load_model(source, dtype, torch.device("cpu"), lambda phase: None)
    theirs = load_transformers(source, dtype)
    print(f"{source.name}, {options.dtype}, {options.threads} threads")
    for batch_size in map(int, options.batches.split(",")):
        compare(
            *(ours, theirs, batch_size),
            *(options.prompt_tokens, options.new_tokens, options.repeats),
        )


if __name__ == "__main__":
    main()
