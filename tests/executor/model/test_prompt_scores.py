"""Prompt log-probabilities of the default model, against transformers in float32."""

from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.llama import Llama
from services.executor.model.loader import load_model
from shared.geometry import blocks_in
from shared.messages import PositionLogprobs, Score, StepResult
from shared.model_source import DEFAULT_MODEL, find_model
from tests.executor.model.test_smollm2 import prompts, transformers_model
from tests.executor.plans import plan, row, sample

pytestmark = pytest.mark.model

__all__ = ["prompts"]  # a fixture
NUM_TOKENS: Final = 200
NUM_TOP: Final = 20
BLOCK_SIZE: Final = 16
NEAR: Final = 1e-4


@pytest.fixture(scope="module")
def text(prompts: list[list[int]]) -> tuple[int, ...]:
    return tuple([token_id for prompt in prompts for token_id in prompt][:NUM_TOKENS])


@pytest.fixture(scope="module")
def expected(text: tuple[int, ...]) -> Tensor:
    """[num_tokens, vocab_size] float64: transformers' log-probabilities after each token."""
    reference: Any = transformers_model()
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([text])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def ours() -> Llama:
    source = find_model(DEFAULT_MODEL)
    return load_model(source, torch.float32, torch.device("cpu"), lambda _: None)


def scored(
    model: Llama, text: tuple[int, ...], cuts: list[int], expected: Tensor
) -> list[PositionLogprobs]:
    """The log-probabilities of text[1:], the prompt cut into chunks at `cuts`.

    In each plan another sequence draws after text[0]: its logits come first, though its row is
    last.
    """
    num_blocks = blocks_in(len(text), BLOCK_SIZE)
    interpreter = Interpreter(model, KVPools(model, num_blocks + 1, BLOCK_SIZE), len(text))
    other = row(text[:1], 0, (num_blocks,), 2, samples=[sample(2, num_top=0)])
    table = tuple(reversed(range(num_blocks)))
    told: list[PositionLogprobs] = []
    for step_id, (start, end) in enumerate(pairwise(cuts), 1):
        after = text[start + 1 : end + 1]
        chunk = row(text[start:end], start, table, samples=[], score=Score(start, after, NUM_TOP))
        result = interpreter.run(plan(chunk, other, step_id=step_id))
        assert isinstance(result, StepResult), result
        told += result.scored[0].logprobs
        assert result.sampled[0].token_id == int(expected[0].argmax())
        chosen = result.sampled[0].logprobs.chosen if result.sampled[0].logprobs else 0.0
        assert chosen == pytest.approx(float(expected[0].max()), abs=2e-3)
    return told


@pytest.mark.parametrize(
    "cuts",
    [[0, NUM_TOKENS], [0, 1, 64, 65, 150, NUM_TOKENS], [*range(0, NUM_TOKENS, 16), NUM_TOKENS]],
    ids=["in one piece", "in odd chunks", "in chunks of a block"],
)
def test_a_prompts_log_probabilities_are_transformers(
    ours: Llama, text: tuple[int, ...], expected: Tensor, cuts: list[int]
) -> None:
    largest, near_ties = 0.0, 0
    told = scored(ours, text, cuts, expected)
    assert len(told) == NUM_TOKENS - 1
    for place, position in enumerate(told):
        wanted, token = expected[place], text[place + 1]
        largest = max(
            largest,
            abs(position.chosen - float(wanted[token])),
            float((torch.tensor(position.top) - wanted[list(position.top_ids)]).abs().max()),
        )
        # A rank may differ only by tokens whose reference lies nearly where the token's does.
        near = int(((wanted - wanted[token]).abs() < NEAR).sum())
        rank = 1 + int((wanted > wanted[token]).sum())
        assert abs(position.rank - rank) <= near
        best = wanted.topk(NUM_TOP).indices.tolist()
        for found, reference_id in zip(position.top_ids, best, strict=True):
            if found != reference_id:
                assert abs(float(wanted[found] - wanted[reference_id])) < NEAR
                near_ties += 1
    print(f"{len(cuts) - 1} chunks: largest difference {largest:.2e}, {near_ties} near ties differ")
    assert largest < 2e-3
