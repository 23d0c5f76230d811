"""The bench against the real processes, with the toy model."""

import json

import pytest

from services.cli import main
from tests.stack import stack as stacks

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    running = stacks.start(tmp_path_factory.mktemp("stack"), "--model", "toy")
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (("--backend", "openai", "--max-concurrency", "3"), 12 * 9),
        (("--backend", "openai-chat", "--request-rate", "100"), 12 * 9),
    ],
)
def test_every_token_is_counted(stack, tmp_path, capsys, flags, tokens):
    status = main(
        [
            "bench", "--base-url", stack.url, "--tokenizer", "toy", "--num-prompts", "12",
            "--random-input-len", "30", "--random-output-len", "9", "--ignore-eos", *flags,
            "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
        ]
    )  # fmt: skip
    assert status == 0, capsys.readouterr()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == tokens
    assert result["tokens_counted_by"] == {"usage": 12}
    assert result["answers_of_asked_length"] == 12
    assert result["total_input_tokens"] >= 12 * 30
    assert result["model_id"] == "toy"
    stacks.until(stack.is_idle, "idle")
