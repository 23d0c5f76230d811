"""Beam searches through core and executor answer what transformers answered (reference.py)."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from services.executor.model.interface import DecoderModel
from services.executor.model.loader import load_model
from shared.model_source import DEFAULT_MODEL, find_model
from shared.sampling import NO_DRAW, EarlyStopping, FinishReason, SamplingParams
from tests.executor.beams.in_process import InProcess
from tests.executor.beams.models import DATA, REAL, SMALL, write_small
from tests.executor.model.tiny import load

NARROW: Final = 1e-4
EARLY: Final = {False: EarlyStopping.NO, True: EarlyStopping.YES, "never": EarlyStopping.NEVER}


def cases_of(name: str) -> list[dict[str, Any]]:
    told: dict[str, Any] = json.loads((DATA / f"beams_{name}.json").read_text(encoding="utf-8"))
    assert told["transformers"]
    return list(told["cases"])


def sampling_of(case: dict[str, Any], logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        draw=NO_DRAW, n=case["n"], use_beam_search=True, length_penalty=case["length_penalty"],
        early_stopping=EARLY[case["early_stopping"]], stop_token_ids=tuple(case["stop_token_ids"]),
        min_tokens=case["min_tokens"], max_tokens=case["max_tokens"], logprobs=logprobs,
    )  # fmt: skip


def check(server: InProcess, cases: list[dict[str, Any]]) -> None:
    """All answers of all cases, in order; every second case tells its scores too."""
    for at, case in enumerate(cases):
        server.submit(str(at), tuple(case["prompt_ids"]), sampling_of(case, 0 if at % 2 else None))
    server.run()
    differing = []
    for at, case in enumerate(cases):
        made = [server.answers[str(at), index] for index in range(case["n"])]
        if [answer.token_ids for answer in made] != case["answers"]:
            assert case["narrowest"] < NARROW, (at, case, made)
            differing.append(at)
            continue
        for answer, wanted in zip(made, case["scores"], strict=True):
            ended = answer.token_ids[-1] in case["stop_token_ids"]
            assert answer.finished
            assert answer.finished.reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert answer.finished.stop_token_id == (answer.token_ids[-1] if ended else None)
            if at % 2:
                total = sum(place.chosen for place in answer.logprobs)
                score = total / len(answer.token_ids) ** case["length_penalty"]
                assert score == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    print(f"{len(cases)} searches in {server.num_steps} steps; {len(differing)} differ where two "
          f"scores are nearer than {NARROW:g}")  # fmt: skip
    assert len(differing) <= len(cases) / 20


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_answer_as_in_transformers(name: str, block_size: int, tmp_path: Path) -> None:
    write_small(name, tmp_path)
    check(InProcess(load(tmp_path), 4096 // block_size, block_size), cases_of(name))


def test_a_small_pool_makes_beams_give_way_and_changes_no_answer(tmp_path: Path) -> None:
    write_small("stories", tmp_path)
    server = InProcess(load(tmp_path), 60, 4, num_cpu_blocks=30)
    check(server, cases_of("stories")[30:])
    assert server.core.counters.preemptions.total() > 0


@pytest.mark.model
def test_the_real_model_answers_as_in_transformers() -> None:
    model: DecoderModel = load_model(
        find_model(DEFAULT_MODEL), torch.float32, torch.device("cpu"), lambda _: None
    )
    check(InProcess(model, 600), cases_of(REAL))
