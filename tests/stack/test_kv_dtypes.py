"""The real processes with the real model over an int8 cache: no less is shared, nothing differs."""

import json

import pytest

from tests.stack.client import post
from tests.stack.stack import start, until

pytestmark = [pytest.mark.stack, pytest.mark.model]

STORY = "The lighthouse keeper wrote down every ship that passed, its flag and its heading. " * 6
WISHES = (" One evening", " Nobody", " One evening")


def answers(folder, *flags):
    """(text, cached tokens) of each wish, and the log of the server that gave them."""
    stack = start(
        folder, "--num-gpu-blocks-override", "40", "--max-model-len", "512",
        "--kv-cache-dtype", "int8", *flags,
    )  # fmt: skip
    try:
        found = []
        for wish in WISHES:
            status, _, text = post(
                stack, "/v1/completions", {"prompt": STORY + wish, "temperature": 0,
                                           "max_tokens": 24, "ignore_eos": True},
            )  # fmt: skip
            assert status == 200, text
            answer = json.loads(text)
            details = answer["usage"].get("prompt_tokens_details") or {}
            found.append((answer["choices"][0]["text"], details.get("cached_tokens") or 0))
        until(stack.is_idle, "idle")
        return found, stack.log.read_text()
    finally:
        stack.stop()


def test_the_prefix_cache_works_over_int8_and_changes_no_answer(tmp_path_factory):
    on, said = answers(tmp_path_factory.mktemp("on"))
    off, _ = answers(tmp_path_factory.mktemp("off"), "--no-enable-prefix-caching")
    assert on[0][1] == 0
    assert min(cached for _, cached in on[1:]) >= 64
    assert [cached for _, cached in off] == [0, 0, 0]
    assert [text for text, _ in on] == [text for text, _ in off]
    assert on[0][0] == on[2][0] != on[1][0]
    assert "kv_dtype=int8" in said
    assert "times_auto=1.94" in said
    assert f"block_bytes={16 * 11_880}" in said
