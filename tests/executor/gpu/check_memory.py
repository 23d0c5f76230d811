"""The step whose memory is measured."""

import pytest
import torch

from services.executor.gpu import memory
from tests.executor.gpu.machines import gpu


@pytest.mark.parametrize("longest", [40, 16, 7])
def test_a_large_step_of_prompts_of_any_length(monkeypatch, longest):
    monkeypatch.setattr(memory, "PROFILED_TOKENS", 40)
    monkeypatch.setattr(memory, "PROFILED_LOGITS", 12)
    model, shapes = gpu().model, []
    forward = model.forward

    def watched(pool, batch):
        logits = forward(pool, batch)
        shapes.append((len(batch.token_ids), int(batch.context_lengths.max()), *logits.shape))
        assert torch.isfinite(logits).all()
        return logits

    monkeypatch.setattr(model, "forward", watched)
    memory.profile(model, 4, longest)
    assert shapes == [(40, longest, 12, model.shape.vocab_size)]
