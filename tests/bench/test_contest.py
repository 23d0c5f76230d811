"""The comparison with other servers, as far as it is arithmetic: loads, floors, ratios, table."""

import json
from pathlib import Path

import pytest

from ops.bench.contest import contestants
from ops.bench.contest.cells import CELLS, Load, choose
from ops.bench.contest.contestants import (
    LlamaServer,
    OpenVino,
    Splitflap,
    Vllm,
    find_peers,
    told_without_paths,
)
from ops.bench.contest.floor import Floor, Limits, Work
from ops.bench.contest.results import Results, Server
from ops.bench.contest.runners import Measure
from ops.bench.contest.table import write_table
from shared import settings
from shared.errors import StartError
from shared.geometry import ModelShape
from tests.bench.tiny_tokens import tiny_tokens

SMOLLM2 = Work(ModelShape(30, 9, 3, 64, 576, 49_152, 8192), 134_515_008, is_tied=True)
ZEN4 = Limits(48e9, 422e9)  # docs/experiments.md, when quiet


def load(tmp_path, name, number=0, *, quick=True):
    return Load.of(CELLS[name], number, tiny_tokens(tmp_path), quick=quick)


def measure(tokens_per_s, ttft_ms=None, **more):
    return Measure(tokens_per_s, ttft_ms, None, 100.0, **more)


def results(**servers):
    told = Results(["A1", "B"])
    for name, rounds in servers.items():
        told.servers[name] = Server("1.0", f"{name} serve", 2.0, rounds)
    return told


def test_the_floor_of_a_decode_step_is_the_published_one():
    """5.7, 6.6 and 21.7 ms at batch 1, 8, 32, context 256: the documented floors of this model."""
    steps = [ZEN4.seconds(*SMOLLM2.decode_step(batch, 256)) for batch in (1, 8, 32)]
    assert [round(1e3 * seconds, 1) for seconds in steps] == [5.7, 6.6, 21.7]


def test_the_floor_of_a_prompt_is_its_products():
    assert SMOLLM2.prefill_flops([(512, 0)]) / ZEN4.flops_per_s == pytest.approx(0.279, rel=0.05)


def test_a_cached_prefix_costs_attention_alone():
    alone = SMOLLM2.prefill_flops([(20, 0)])
    behind_512 = SMOLLM2.prefill_flops([(20, 512)])
    assert behind_512 - alone == 4 * 30 * 9 * 64 * 20 * 512


def test_a_floor_counts_prompts_and_full_steps(tmp_path):
    of_load = load(tmp_path, "A8")
    floor = Floor.of(of_load, SMOLLM2, ZEN4)
    steps = (of_load.output_tokens - len(of_load.plans)) / 8
    whole_s = floor.prefill_s + steps * floor.step_s
    assert floor.tokens_per_s == pytest.approx(of_load.output_tokens / whole_s)


def test_the_shared_prefix_of_b_is_computed_once(tmp_path):
    of_load = load(tmp_path, "B")
    shared, *own = of_load.computed_prompts
    assert shared == (512, 0)
    assert [new for new, _ in own] == [plan.prompt_tokens - 512 for plan in of_load.plans]
    assert {cached for _, cached in own} == {512}


def test_the_four_answers_of_c_decode_together(tmp_path):
    of_load = load(tmp_path, "C")
    assert of_load.sequences == 4 * 4
    assert of_load.output_tokens == len(of_load.plans) * 4 * 64


def test_no_two_cells_or_rounds_share_a_request(tmp_path):
    loads = [load(tmp_path, name, number) for name in ("A1", "A8") for number in (0, 1)]
    prompts = [plan.text for one in loads for plan in (*one.plans, *one.warm_up)]
    assert len(set(prompts)) == len(prompts)


def test_quick_asks_for_less(tmp_path):
    assert len(load(tmp_path, "A8", quick=False).plans) == 24
    assert len(load(tmp_path, "A8").plans) == 8


def test_the_long_workload_is_long(tmp_path):
    plans = load(tmp_path, "L").plans
    assert all(1500 <= plan.prompt_tokens <= 1900 and plan.max_tokens == 64 for plan in plans)


def test_a_cell_that_does_not_exist_is_named():
    assert [cell.name for cell in choose("A1,B")] == ["A1", "B"]
    with pytest.raises(SystemExit, match="no A2; choose of A1, A8"):
        choose("A1,A2")


def test_the_ratio_is_to_the_best_peer_of_each_cell():
    told = results(
        splitflap={"A1": [measure(100), measure(120), measure(110)], "B": [measure(50)]},
        slow={"A1": [measure(20)], "B": [measure(100)]},
        quick={"A1": [measure(55)], "B": [measure(10)]},
    )
    assert (told.best_peer("A1"), told.best_peer("B")) == (("quick", 55), ("slow", 100))
    assert (told.ratio("A1"), told.ratio("B")) == (2.0, 0.5)


def test_of_times_the_shortest_is_best():
    told = results(
        splitflap={"A1": [measure(1, ttft_ms=90)]},
        one={"A1": [measure(1, ttft_ms=100)]},
        offline={"A1": [measure(9)]},
    )
    assert told.best_peer("A1", "ttft_ms") == ("one", 100)
    assert told.ratio("A1", "ttft_ms") == 0.9


def test_without_peers_there_is_no_ratio():
    told = results(splitflap={"A1": [measure(100)]})
    assert (told.best_peer("A1"), told.ratio("A1")) == (None, None)


def test_times_the_floor_is_the_median_of_each_rounds_own_ratio():
    told = results(splitflap={"A1": [measure(50), measure(10), measure(40)]})
    told.floors["A1"] = [Floor(0, 0, tokens) for tokens in (100, 100, 100)]
    assert told.x_of_floor("splitflap", "A1") == 2.5


def test_a_round_that_failed_is_told_and_is_no_number():
    failed = measure(0.0, failed=8, first_error="connection lost: gone")
    told = results(splitflap={"A1": [failed, measure(100)]})
    assert told.servers["splitflap"].median("A1", "tokens_per_s") == 100
    assert list(told.failures()) == [
        "splitflap, A1: 8 requests failed; the first: connection lost: gone"
    ]


def test_the_table_has_a_dash_where_there_is_no_number():
    told = results(
        splitflap={"A1": [measure(100, ttft_ms=90)], "B": [measure(50)]},
        other={"A1": [measure(80, ttft_ms=100)]},
    )
    lines = [" ".join(line.split()) for line in write_table(told).splitlines()]
    assert lines[:4] == [
        "output tokens/s A1 B", "splitflap 100 50", "other 80 -", "splitflap / best peer 1.25 -",
    ]  # fmt: skip
    assert "splitflap / best peer 0.90 -" in lines
    assert "splitflap 2.0 0.00 1.0" in lines


def test_results_are_json():
    told = results(splitflap={"A1": [measure(100, ttft_ms=90)]}, other={"A1": [measure(80)]})
    again = json.loads(json.dumps(told.as_json()))
    assert again["summary"]["A1"]["ratio_to_best_peer"] == 1.25
    assert again["servers"]["other"]["rounds"]["A1"][0]["tokens_per_s"] == 80


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def a_machine_without_peers(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(contestants.PEERS_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path


@pytest.mark.usefixtures("a_machine_without_peers")
def test_where_no_peer_is_found_transformers_remains():
    assert find_peers(None) == ([], True)


def test_peers_are_found_on_the_path(a_machine_without_peers):
    vllm = executable(a_machine_without_peers / "bin" / "vllm")
    llama = executable(a_machine_without_peers / "bin" / "llama-server")
    executable(vllm.with_name("python"))
    assert find_peers(None) == ([Vllm(vllm.with_name("python")), LlamaServer(llama)], True)


def test_peers_that_are_named_are_all_that_run(a_machine_without_peers, monkeypatch):
    executable(a_machine_without_peers / "bin" / "llama-server")
    python = executable(a_machine_without_peers / "venv" / "bin" / "python")
    monkeypatch.setenv(contestants.PEERS_VARIABLE, f"openvino={python.parents[1]}")
    assert find_peers(None) == ([OpenVino(python)], False)
    assert find_peers("transformers") == ([], True)
    assert find_peers("none") == ([], False)


def test_the_variable_of_peers_is_read_and_no_setting(a_machine_without_peers, monkeypatch):
    """`splitflap up` inherits it, and refuses a name like those of its settings."""
    llama = executable(a_machine_without_peers / "llama-server")
    monkeypatch.setenv("BENCH_PEERS", f"llama={llama}")
    assert find_peers(None) == ([LlamaServer(llama)], False)
    monkeypatch.delenv("SPLITFLAP_CONFIG", raising=False)
    settings.load(settings.UpSettings, [], "splitflap up")
    monkeypatch.setenv("SPLITFLAP_BENCH_PEERS", "none")
    with pytest.raises(StartError, match="no setting is called bench_peers"):
        settings.load(settings.UpSettings, [], "splitflap up")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("sglang", "unknown; choose of vllm, llama, openvino, transformers, or none"),
        ("llama=/no/such/binary", "there is none /no/such/binary"),
        ("vllm", "there is none on the PATH"),
    ],
)
@pytest.mark.usefixtures("a_machine_without_peers")
def test_a_peer_that_is_not_there_is_named(said, complaint):
    with pytest.raises(SystemExit, match=f"--peers {said}: {complaint}"):
        find_peers(said)


def test_what_is_kept_of_a_command_names_no_folder_of_this_machine():
    command = ["/opt/venv/bin/vllm", "serve", "--model=/home/me/hf", "--port", "8101"]
    environment = {"LD_PRELOAD": "/usr/lib/a.so:/usr/lib/b.so", "THREADS": "0-1"}
    assert told_without_paths(command, environment) == (
        "LD_PRELOAD=a.so:b.so THREADS=0-1 vllm serve --model=hf --port 8101"
    )


def test_vllm_gets_the_libraries_of_its_own_environment(tmp_path):
    python = executable(tmp_path / "bin" / "python")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert str(tmp_path / "lib" / "libiomp5.so") in Vllm(python).environment()["LD_PRELOAD"]


def test_the_pool_is_as_large_as_the_server_said():
    log = '{"blocks": 100, "block_size": 16, "event": "pool: 100 blocks of 16"}\nno json\n'
    assert Splitflap(bytes_per_token=10).pool_bytes(log) == 16_000
    assert Splitflap(bytes_per_token=10).pool_bytes("") is None


def test_the_bench_knows_where_the_checkout_is():
    assert (contestants.ROOT / "pyproject.toml").exists()
    assert Path(contestants.__file__).is_relative_to(contestants.ROOT)
