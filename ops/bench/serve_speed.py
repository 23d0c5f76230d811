"""Splitflap as a server against transformers' own `generate`, side by side in one run.

    python -m ops.bench.serve_speed [--rounds 3] [--json FILE]

Same weights, dtype, threads, prompts (cut from this repository's docs, 32 to 256 tokens) and output
lengths (128 tokens, end of text ignored). Splitflap answers 1 and 32 clients in a closed loop over
HTTP, streamed; transformers generates the same requests offline, one by one and as a left-padded
batch of 32. The two take turns, each round; what is reported are medians and their ratios. (The
idle server takes about 2 % of a core while the other runs.)
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import torch
import transformers

from ops.bench.model_speed import load_transformers
from services.gateway.tokenizer import load_tokenizer
from shared.model_source import DEFAULT_MODEL, find_model

ROOT = Path(__file__).parents[2]
OUTPUT_TOKENS = 128
SHORTEST, LONGEST = 32, 256
REQUESTS = {1: 4, 32: 32}  # clients -> requests a round


def prompts(count: int, seed: int) -> list[str]:
    """`count` texts of SHORTEST to LONGEST tokens."""
    tokenizer = load_tokenizer(find_model(DEFAULT_MODEL))
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    dice = random.Random(seed)
    cuts = []
    for _ in range(count):
        length = dice.randint(SHORTEST, LONGEST)
        start = dice.randrange(len(ids) - length)
        cuts.append(
            b"".join(map(tokenizer.bytes_of, ids[start : start + length])).decode(errors="ignore")
        )
    return cuts


class Server:
    """`splitflap up` with the default model, on a free port."""

    def __init__(self, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", "--port", str(port),
             "--log-level", "warning", *flags],
            cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while not self._ready():
            time.sleep(0.05)
        self.ready_s = time.monotonic() - started

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            sys.exit("the server did not start")
        try:
            with urllib.request.urlopen(self.url + "/health/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stop(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[int, float, float]:
    """(tokens, time to first token in s, time per output token in s) of one streamed request."""
    body = {
        "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = first = last = time.perf_counter()
    tokens = 0
    async with session.post(url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["text"]:
                last = time.perf_counter()
                first = last if first == started else first
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return tokens, first - started, (last - first) / (OUTPUT_TOKENS - 1)


async def closed_loop(url: str, clients: int, texts: list[str]) -> dict[str, float]:
    """Every client asks the next prompt as soon as it has its answer."""
    waiting = iter(texts)
    seen: list[tuple[int, float, float]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def client() -> None:
            for text in waiting:
                seen.append(await ask(session, url, text))

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        took_s = time.perf_counter() - started
    assert all(tokens == OUTPUT_TOKENS for tokens, _, _ in seen)
    return {
        "tokens_per_s": len(texts) * OUTPUT_TOKENS / took_s,
        "ttft_ms": 1e3 * statistics.median(ttft for _, ttft, _ in seen),
        "tpot_ms": 1e3 * statistics.median(tpot for _, _, tpot in seen),
    }


class Transformers:
    """The same weights in transformers, offline."""

    def __init__(self) -> None:
        source = find_model(DEFAULT_MODEL)
        self._tokenizer = load_tokenizer(source)
        self._model = load_transformers(source, torch.bfloat16)

    def run(self, texts: list[str], batch: int) -> dict[str, float]:
        """Tokens per second over `texts` in batches of `batch`."""
        started = time.perf_counter()
        for first in range(0, len(texts), batch):
            ids = [
                self._tokenizer.encode(text, add_special_tokens=True)
                for text in texts[first : first + batch]
            ]
            width = max(map(len, ids))
            padded = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
            with torch.inference_mode():
                out = self._model.generate(
                padded, attention_mask=mask, do_sample=False, pad_token_id=0,
                min_new_tokens=OUTPUT_TOKENS, max_new_tokens=OUTPUT_TOKENS,
            )  # fmt: skip
            assert out.shape[1] == width + OUTPUT_TOKENS
        return {"tokens_per_s": len(texts) * OUTPUT_TOKENS / (time.perf_counter() - started)}


def main() -> None:
    """Run, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    wish, flags = parser.parse_known_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    theirs = Transformers()
    ours = Server(["--dtype", "bfloat16", "--threads", str(threads), *flags])
    rows: dict[str, dict[int, list[dict[str, float]]]] = {"splitflap": {}, "transformers": {}}
    try:
        for round_number in range(wish.rounds):
            for clients, count in REQUESTS.items():
                texts = prompts(count, seed=round_number)
                if round_number == 0:
                    asyncio.run(closed_loop(ours.url, 1, texts[:1]))  # warm
                mine = asyncio.run(closed_loop(ours.url, clients, texts))
                other = theirs.run(texts, batch=clients)
                rows["splitflap"].setdefault(clients, []).append(mine)
                rows["transformers"].setdefault(clients, []).append(other)
                print(f"round {round_number + 1}, {clients} clients: {mine} | {other}", flush=True)
    finally:
        ours.stop()
    report(rows, ours.ready_s, threads, wish.json)


def report(
    rows: dict[str, dict[int, list[dict[str, float]]]],
    ready_s: float,
    threads: int,
    file: Path | None,
) -> None:
    """Medians and ratios."""
    print(f"\nSmolLM2-135M bf16, {threads} threads, ready after {ready_s:.1f} s")
    print(f"{'clients':>7} {'splitflap tok/s':>16} {'transformers':>13} {'ratio':>6} "
          f"{'TTFT ms':>8} {'TPOT ms':>8}")  # fmt: skip
    summary: dict[str, object] = {
        "ready_s": ready_s, "threads": threads, "versions": {
            "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip
    for clients in REQUESTS:
        mine = {
            name: statistics.median(row[name] for row in rows["splitflap"][clients])
            for name in rows["splitflap"][clients][0]
        }
        other = statistics.median(row["tokens_per_s"] for row in rows["transformers"][clients])
        ratio = mine["tokens_per_s"] / other
        print(f"{clients:>7} {mine['tokens_per_s']:>16.1f} {other:>13.1f} {ratio:>6.2f} "
              f"{mine['ttft_ms']:>8.1f} {mine['tpot_ms']:>8.1f}")  # fmt: skip
        summary[str(clients)] = {**mine, "transformers_tokens_per_s": other, "ratio": ratio}
    if file is not None:
        file.write_text(json.dumps({**summary, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
