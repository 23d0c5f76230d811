"""From flags to requests: which data set, of which lengths."""

import json
from pathlib import Path

from services.bench.body import as_asked
from services.bench.datasets import (
    burstgpt_requests,
    prefix_repetition_requests,
    random_requests,
    sharegpt_requests,
)
from services.bench.plan import Planned, Text
from services.bench.settings import BenchSettings
from services.bench.workloads import CORPUS, build_workload, read_paragraphs


def build(settings: BenchSettings, count: int, seed: int, tokens: Text) -> list[Planned]:
    """`count` requests of the chosen data set, with the wishes of `--extra-body`.

    Raises: StartError if the data set's file is no good.
    """
    extra = json.loads(settings.extra_body)
    return [as_asked(plan, extra) for plan in _of_data_set(settings, count, seed, tokens)]


def _of_data_set(settings: BenchSettings, count: int, seed: int, tokens: Text) -> list[Planned]:
    path = settings.dataset_path or Path()
    match settings.dataset_name:
        case "random":
            return random_requests(
                count,
                seed,
                tokens,
                prefix_len=settings.random_prefix_len,
                input_len=settings.random_input_len,
                output_len=settings.random_output_len,
                range_ratio=settings.random_range_ratio,
            )
        case "prefix_repetition":
            return prefix_repetition_requests(
                count,
                seed,
                tokens,
                prefix_len=settings.prefix_repetition_prefix_len,
                suffix_len=settings.prefix_repetition_suffix_len,
                num_prefixes=settings.prefix_repetition_num_prefixes,
                output_len=settings.prefix_repetition_output_len,
            )
        case "sharegpt":
            return sharegpt_requests(
                path, count, seed, tokens, output_len=settings.sharegpt_output_len
            )
        case "burstgpt":
            return burstgpt_requests(path, count, seed, tokens)
        case "A" | "B" | "C" | "L" as workload:
            paragraphs = read_paragraphs(settings.dataset_path or CORPUS)
            return build_workload(workload, count, seed, tokens, paragraphs)
