"""Fixed workloads, cut from English prose: A chat, B a shared prefix, C several answers, L long.

A: prompts of 32 to 256 tokens, 64 to 192 tokens out. B: a system prompt of 512 tokens that all
share, a user's 12 to 32 tokens, 32 out. C: prompts of 200 tokens, four sampled answers of 64.
L: prompts of 1,500 to 1,900 tokens, 64 out.
Request i depends on (workload, seed, tokenizer, corpus) alone, not on how many there are.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from services.bench.plan import Planned, Text, of_user
from shared.errors import StartError

Workload = Literal["A", "B", "C", "L"]
WORKLOADS: Final[tuple[Workload, ...]] = get_args(Workload)
CORPUS: Final = Path(__file__).with_name("corpus.txt")  # docs/bench.md says whose text it is


def read_paragraphs(path: Path) -> list[str]:
    """The paragraphs of a corpus, one a line. Raises: StartError if it cannot be read."""
    try:
        paragraphs = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise StartError(f"--dataset-path {path}: cannot be read as text ({error})") from error
    if not any(paragraphs):
        raise StartError(f"--dataset-path {path}: holds no text; give one paragraph a line")
    return paragraphs


def build_workload(
    workload: Workload, count: int, seed: int, tokens: Text, paragraphs: Sequence[str]
) -> list[Planned]:
    """`count` requests; the same dice in the same order for the same seed."""
    dice = random.Random(f"{workload}-{seed}")

    def cut(num_tokens: int) -> str:
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += tokens.encode(dice.choice(paragraphs) + " ")
        return tokens.decode(ids[:num_tokens]).strip()

    match workload:
        case "A":
            return [_chat(dice, cut) for _ in range(count)]
        case "B":
            system = cut(512)
            return [_after(system, dice, cut) for _ in range(count)]
        case "C":
            return [_several(cut, 1000 + index) for index in range(count)]
        case "L":
            return [_long(dice, cut) for _ in range(count)]


def _chat(dice: random.Random, cut: Callable[[int], str]) -> Planned:
    prompt_tokens, max_tokens = dice.randint(32, 256), dice.randint(64, 192)
    return of_user(cut(prompt_tokens), max_tokens, prompt_tokens)


def _after(system: str, dice: random.Random, cut: Callable[[int], str]) -> Planned:
    own_tokens = dice.randint(12, 32)
    messages = (
        {"role": "system", "content": system},
        {"role": "user", "content": cut(own_tokens)},
    )
    return Planned(messages, max_tokens=32, prompt_tokens=512 + own_tokens)


def _several(cut: Callable[[int], str], seed: int) -> Planned:
    message = {"role": "user", "content": cut(200)}
    return Planned(
        (message,), max_tokens=64, prompt_tokens=200, num_choices=4, temperature=0.8, seed=seed
    )


def _long(dice: random.Random, cut: Callable[[int], str]) -> Planned:
    prompt_tokens = dice.randint(1500, 1900)
    return of_user(cut(prompt_tokens), 64, prompt_tokens)
