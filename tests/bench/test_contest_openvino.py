"""The thin server over OpenVINO GenAI, with a pipeline of the same form instead of OpenVINO's."""

import argparse
import importlib
import json
import sys
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from services.bench.build import build
from services.bench.outcome import judge
from services.bench.run import run
from services.bench.settings import load_settings
from tests.bench.tiny_tokens import save, tiny_tokens

NONE, LENGTH = SimpleNamespace(name="NONE"), SimpleNamespace(name="LENGTH")


class Handle:
    """Gives out what was made; of several answers nothing before the end, as OpenVINO does."""

    def __init__(self, ids, config):
        self.ids, self.config = ids, config
        self.made, self.waiting = 0, {}

    def step(self):
        self.made += 1
        reason = LENGTH if self.made == self.config.max_new_tokens else NONE
        for name in range(self.config.num_return_sequences):
            self.waiting.setdefault(name, []).append((ord("x") - ord("!"), reason))

    def is_over(self):
        return self.made == self.config.max_new_tokens

    def can_read(self):
        return bool(self.waiting) and (self.config.num_return_sequences == 1 or self.is_over())

    def read(self):
        waiting, self.waiting = self.waiting, {}
        return {
            100 + name: SimpleNamespace(
                generated_ids=[token for token, _ in parts], finish_reason=parts[-1][1]
            )
            for name, parts in waiting.items()
        }

    def get_status(self):
        return SimpleNamespace(name="FINISHED" if self.is_over() else "RUNNING")


class Pipeline:
    """ContinuousBatchingPipeline, as far as the server uses it."""

    def __init__(self, folder, scheduler, device, properties):
        self.handles, self.seen = [], []
        Pipeline.last = self

    def add_request(self, number, ids, config):
        self.handles.append(Handle(ids, config))
        self.seen.append((number, ids, config))
        return self.handles[-1]

    def step(self):
        for handle in self.handles:
            if not handle.is_over():
                handle.step()


@pytest.fixture
async def server(tmp_path, monkeypatch):
    """(its URL, the requests its pipeline saw)."""
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=Pipeline,
        GenerationFinishReason=SimpleNamespace(NONE=NONE),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    openvino = SimpleNamespace(Tensor=lambda ids: ids[0].tolist())
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    save(tmp_path)
    template = {"chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    name = "ops.bench.contest.openvino_server"
    module = importlib.import_module(name)
    options = argparse.Namespace(
        folder=tmp_path, cache_gib=1, max_num_seqs=4, max_num_batched_tokens=64, precision="bf16"
    )
    async with TestServer(module.application(options)) as started:
        yield f"http://127.0.0.1:{started.port}", Pipeline.last.seen
    monkeypatch.delitem(sys.modules, name)


async def outcomes(url, tmp_path, workload, clients):
    """What our own bench makes of its answers."""
    flags = ["--workload", workload, "--concurrency", str(clients), "--num-prompts", "5"]
    settings = load_settings([*flags, "--base-url", url, "--ignore-eos", "--disable-tqdm"])
    tokens = tiny_tokens(tmp_path)
    plans = build(settings, 5, 1, tokens)
    ran = await run(settings, plans, [])
    recorded = zip(plans, ran.recordings, strict=True)
    return plans, [judge(plan, recording, tokens.count) for plan, recording in recorded]


async def test_answers_are_streamed_token_by_token(server, tmp_path):
    url, _ = server
    plans, ended = await outcomes(url, tmp_path, "A", clients=3)
    assert [outcome.output_tokens for outcome in ended] == [plan.max_tokens for plan in plans]
    assert all(len(outcome.events_s) == outcome.output_tokens for outcome in ended)
    assert {outcome.texts for outcome in ended} == {("x" * plan.max_tokens,) for plan in plans}


async def test_several_answers_to_one_prompt_all_come(server, tmp_path):
    url, seen = server
    _, ended = await outcomes(url, tmp_path, "C", clients=2)
    assert [outcome.output_tokens for outcome in ended] == [4 * 64] * 5
    assert {outcome.texts for outcome in ended} == {("x" * 64,) * 4}
    _, _, config = seen[0]
    assert (config.num_return_sequences, config.do_sample, config.temperature) == (4, True, 0.8)


async def test_the_pipeline_gets_what_was_asked(server, tmp_path):
    url, seen = server
    body = {"model": "m", "stream": True, "max_tokens": 3, "temperature": 0, "prompt": "the x"}
    async with aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=body) as answer:
            text = await answer.text()
        async with session.get(url + "/health") as answer:
            assert answer.status == 200
    assert text.endswith("data: [DONE]\n\n")
    ((_, ids, config),) = seen
    assert tuple(ids) == tiny_tokens(tmp_path).encode("the x")
    assert (config.max_new_tokens, config.ignore_eos, config.eos_token_id) == (3, False, 2)
    assert not hasattr(config, "do_sample"), "greedy"


async def test_what_is_not_streamed_is_refused(server):
    url, _ = server
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert answer.status == 400
