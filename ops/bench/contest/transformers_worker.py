"""transformers' `generate` as a process: one batch for each line of JSON it reads, offline.

    {"prompts": [messages, ...], "max_tokens": [...], "n": 1, "temperature": 0.0}
    -> {"seconds": 1.2}

A static batch, padded on the left, ends when its longest answer does.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def generate(model: Any, tokenizer: Any, asked: dict[str, Any]) -> float:
    """Seconds for one batch, from its messages to its last token."""
    began_s = time.perf_counter()
    batch = tokenizer.apply_chat_template(
        asked["prompts"], add_generation_prompt=True, padding=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
    longest = max(asked["max_tokens"])
    sampling = {"do_sample": False}
    if asked["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0}
    with torch.inference_mode():
        made = model.generate(
            **batch, min_new_tokens=longest, max_new_tokens=longest,
            num_return_sequences=asked["n"], pad_token_id=tokenizer.pad_token_id, **sampling,
        )  # fmt: skip
    seconds = time.perf_counter() - began_s
    if made.shape[1] != batch["input_ids"].shape[1] + longest:
        raise SystemExit(f"asked for {longest} tokens, got a tensor of shape {tuple(made.shape)}")
    return seconds


def main() -> None:
    """Load the folder that is named, say so, then work line by line."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": generate(model, tokenizer, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
