"""The flags: vLLM's names, what they default to, and what is refused."""

import pytest

from services.bench.settings import load_settings
from shared.errors import StartError


def test_defaults_are_those_of_vllm():
    settings = load_settings([])
    assert settings.url == "http://127.0.0.1:8000/v1/completions"
    assert (settings.dataset_name, settings.count, settings.warmups) == ("random", 1000, 0)
    assert (settings.random_input_len, settings.random_output_len) == (1024, 128)
    assert settings.request_rate == float("inf")


def test_our_workloads_talk_and_are_short():
    settings = load_settings(["--workload", "A", "--concurrency", "8"])
    assert settings.url == "http://127.0.0.1:8000/v1/chat/completions"
    assert (settings.workload, settings.max_concurrency) == ("A", 8)
    assert (settings.count, settings.warmups) == (24, 2)
    assert load_settings(["--dataset-name=B"]).count == 8


@pytest.mark.parametrize("flag", ["--backend", "--endpoint-type"])
def test_the_backend_has_two_names(flag):
    url = load_settings([flag, "openai-chat", "--base-url", "http://h:1/"]).url
    assert url == "http://h:1/v1/chat/completions"


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_may_end_as_for_other_clients(base):
    assert load_settings(["--base-url", base]).url == "http://h:1/v1/completions"


@pytest.mark.parametrize(
    ("host", "root"),
    [
        ("here", "http://here:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
    ],
)
def test_a_host_may_be_an_ipv6_address(host, root):
    assert load_settings(["--host", host]).root_url == root


def test_lists_are_written_as_vllm_writes_them():
    settings = load_settings(
        [
            "--goodput",
            "ttft:200",
            "tpot:50.5",
            "--seed",
            "3",
            "--metadata=a=1,2",
            "--metadata",
            "b=",
        ]
    )
    assert settings.goodput_s == {"ttft": 0.2, "tpot": 0.0505}
    assert settings.metadata == ("a=1,2", "b=")
    assert settings.seed == 3


def test_only_sampling_that_was_asked_for_is_sent():
    assert load_settings([]).sampling == {}
    asked = load_settings(["--temperature", "0", "--top-k", "5", "--ignore-eos"])
    assert asked.sampling == {"temperature": 0, "top_k": 5, "ignore_eos": True}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--num-promts 3", "--num-promts"),
        ("--num-p 3", "--num-p"),
        ("stray", "stray"),
        ("--num-prompts 0", "--num-prompts '0'"),
        ("--request-rate 0", "--request-rate"),
        ("--request-rate nan", "--request-rate"),
        ("--burstiness 0", "--burstiness"),
        ("--random-range-ratio 1", "--random-range-ratio"),
        ("--dataset-name D", "--dataset-name 'D': choose from A, B, C, L, random"),
        ("--dataset-name burstgpt", "burstgpt needs --dataset-path"),
        ("--goodput itl:5", "--goodput .*'itl:5': write ttft, tpot, e2el"),
        ("--goodput ttft", "--goodput ttft: 'ttft': write .*like ttft:200"),
        ("--goodput ttft:nan", "--goodput"),
        ("--metadata a", "--metadata .*KEY=VALUE"),
        ("--extra-body nope", "--extra-body 'nope'"),
        ("--extra-body []", "--extra-body .*no JSON object"),
        ("--percentile-metrics ttft,x", "--percentile-metrics .*x: choose from"),
        ("--metric-percentiles 101", "--metric-percentiles .*between 0 and 100"),
        ("--metric-percentiles ,", "--metric-percentiles"),
        ("--base-url host:80", "--base-url host:80: begins with http"),
        ("--backend vllm", "--backend 'vllm'"),
    ],
)
def test_what_is_wrong_is_named(flags, complaint):
    with pytest.raises(StartError, match=complaint):
        load_settings(flags.split())
