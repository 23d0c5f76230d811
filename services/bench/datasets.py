"""The data sets of `vllm bench serve` that this bench knows, by vLLM's names.

Lengths and shapes follow vLLM's; the texts are drawn with dice of our own, so prompts differ from
those that vLLM draws for the same seed.
"""

import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from services.bench.plan import Planned, Text, of_user
from shared.errors import StartError

_TRIES: Final = 10  # re-encoding may join tokens; so often the length is corrected
_SHAREGPT_SHORTEST: Final = 4  # tokens of prompt and of answer; as vLLM's is_valid_sequence
_SHAREGPT_LONGEST_PROMPT: Final = 1024
_SHAREGPT_LONGEST: Final = 2048


def random_text(dice: random.Random, tokens: Text, num_tokens: int) -> tuple[str, int]:
    """A text of random tokens, and how many it has: `num_tokens`, or as near as can be had."""
    known = tokens.plain_ids()
    ids: Sequence[int] = [dice.choice(known) for _ in range(num_tokens)]
    text = tokens.decode(ids)
    for _ in range(_TRIES):
        ids = tokens.encode(text)
        if len(ids) == num_tokens:
            break
        missing = num_tokens - len(ids)
        ids = [*ids[:num_tokens], *(dice.choice(known) for _ in range(missing))]
        text = tokens.decode(ids)
    return text, len(tokens.encode(text))


def random_requests(
    count: int,
    seed: int,
    tokens: Text,
    *,
    prefix_len: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
) -> list[Planned]:
    """Random tokens behind a prefix that all share.

    Lengths are uniform within a share `range_ratio` of `input_len` and `output_len`, both ways.
    """
    dice = random.Random(f"random-{seed}")
    prefix, _ = random_text(dice, tokens, prefix_len)

    def length(middle: int) -> int:
        low, high = math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))
        return dice.randint(max(1, low), high)

    plans = []
    for _ in range(count):
        text, num_tokens = random_text(dice, tokens, length(input_len))
        plans.append(of_user(prefix + text, length(output_len), prefix_len + num_tokens))
    return plans


def prefix_repetition_requests(
    count: int,
    seed: int,
    tokens: Text,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
) -> list[Planned]:
    """Random suffixes behind `num_prefixes` random prefixes, in shuffled order."""
    dice = random.Random(f"prefix_repetition-{seed}")
    prefixes = [random_text(dice, tokens, prefix_len) for _ in range(num_prefixes)]
    plans = []
    for index in range(count):
        prefix, of_prefix = prefixes[index % num_prefixes]
        suffix, of_suffix = random_text(dice, tokens, suffix_len)
        plans.append(of_user(prefix + suffix, output_len, of_prefix + of_suffix))
    dice.shuffle(plans)
    return plans


def sharegpt_requests(
    path: Path, count: int, seed: int, tokens: Text, *, output_len: int | None
) -> list[Planned]:
    """First prompts of a ShareGPT file; answers as long as the file's own unless told otherwise.

    Prompts over 1,024 tokens, conversations over 2,048 and anything under 4 are left out. If too
    few are left, some are taken again.
    Raises: StartError if the file is not of this form, or no conversation fits.
    """
    dice = random.Random(f"sharegpt-{seed}")
    conversations = [turns for turns in map(_turns, _read_list(path)) if len(turns) >= 2]
    dice.shuffle(conversations)
    plans: list[Planned] = []
    for prompt, answer, *_ in conversations:
        if len(plans) == count:
            break
        num_prompt = len(tokens.encode(prompt))
        num_answer = output_len if output_len is not None else len(tokens.encode(answer))
        if _fits(num_prompt, num_answer, output_len is not None):
            plans.append(of_user(prompt, num_answer, num_prompt))
    if not plans:
        raise StartError(f"--dataset-path {path}: no conversation of two turns that fits")
    return plans + dice.choices(plans, k=count - len(plans))


def _fits(num_prompt: int, num_answer: int, is_answer_fixed: bool) -> bool:
    is_long_enough = num_prompt >= _SHAREGPT_SHORTEST and (
        is_answer_fixed or num_answer >= _SHAREGPT_SHORTEST
    )
    is_short_enough = (
        num_prompt <= _SHAREGPT_LONGEST_PROMPT and num_prompt + num_answer <= _SHAREGPT_LONGEST
    )
    return is_long_enough and is_short_enough


def _read_list(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"--dataset-path {path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, list):
        raise StartError(f"--dataset-path {path}: is no list of conversations (ShareGPT)")
    return content


def _turns(entry: Any) -> list[str]:
    """The texts of a ShareGPT conversation; none for an entry of another form."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns or ()]
    return [text for text in texts if isinstance(text, str)]


def burstgpt_requests(path: Path, count: int, seed: int, tokens: Text) -> list[Planned]:
    """Random tokens, as many as in rows of a BurstGPT trace (GPT-4 ones that were answered).

    Raises: StartError if the file is not of this form.
    """
    dice = random.Random(f"burstgpt-{seed}")
    lengths = _burstgpt_lengths(path)
    enough = count <= len(lengths)
    chosen = dice.sample(lengths, count) if enough else dice.choices(lengths, k=count)
    plans = []
    for input_len, output_len in chosen:
        text, num_tokens = random_text(dice, tokens, input_len)
        plans.append(of_user(text, output_len, num_tokens))
    return plans


def _burstgpt_lengths(path: Path) -> list[tuple[int, int]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (int(row["Request tokens"]), int(row["Response tokens"]))
                for row in csv.DictReader(file)
                if row["Model"] == "GPT-4"
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(
            f"--dataset-path {path}: is no BurstGPT table with the columns Model, Request tokens "
            f"and Response tokens ({error!r})"
        ) from error
    answered = [(asked, given) for asked, given in rows if asked > 0 and given > 0]
    if not answered:
        raise StartError(f"--dataset-path {path}: no answered GPT-4 request in it")
    return answered
