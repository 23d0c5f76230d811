"""The comparison with other servers, as far as it starts processes and looks at them."""

import os
import sys
from pathlib import Path

import pytest
import torch

from ops.bench.contest import memory
from ops.bench.contest.__main__ import Turns
from ops.bench.contest.cells import CELLS, Load
from ops.bench.contest.contestants import ROOT
from ops.bench.contest.floor import Work
from ops.bench.contest.memory import PeakMemory, resident_in_mappings_of, tree
from ops.bench.contest.recording import Recorded, read, record, write
from ops.bench.contest.results import Results
from ops.bench.contest.runners import ServerRunner
from ops.bench.contest.server_cost import Pools, Span, replay, serve, write_shares
from ops.bench.contest.server_process import DidNotStart
from services.executor.interpreter import Interpreter
from services.executor.kv_pool import KVPools
from services.executor.model.toy import ToyModel
from shared.geometry import ModelShape
from shared.messages import StepFailed
from tests.bench.fake_contestant import TOKENS
from tests.bench.tiny_tokens import tiny_tokens
from tests.executor.plans import plan, row

MIB = 2**20


class Fake:
    """A contestant that answers five times "x"."""

    name = "fake"
    extra_body = "{}"
    ready_path = "/health"

    def __init__(self, mood=""):
        self._mood = mood

    def version(self):
        return "0.1"

    def prepare(self, weights):
        pass

    def command(self, weights, port):
        return [sys.executable, "-m", "tests.bench.fake_contestant", str(port), self._mood]

    def environment(self):
        return {}

    def pool_bytes(self, log):
        return None


@pytest.fixture
def runner(tmp_path):
    """Makes runners, and stops them."""
    made = []

    def make(mood=""):
        made.append(ServerRunner(Fake(mood), None, tmp_path, len))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        assert not one.is_alive()


def load(tmp_path, name="A8"):
    return Load.of(CELLS[name], 0, tiny_tokens(tmp_path), quick=True)


def test_a_server_is_started_loaded_and_stopped(runner, tmp_path):
    fake = runner()
    fake.start()
    assert fake.is_alive()
    assert fake.ready_s > 0
    measured = fake.measure(load(tmp_path))
    assert (measured.failed, measured.first_error) == (0, None)
    assert measured.tokens_per_s > 0
    assert measured.ttft_ms > 0
    assert measured.pss_mib > 1


def test_several_answers_are_all_counted(runner, tmp_path):
    fake = runner()
    fake.start()
    of_load = load(tmp_path, "C")
    measured = fake.measure(of_load)
    assert measured.tokens_per_event == 1
    assert measured.of_asked_length == 0, f"{TOKENS} tokens each, where 64 were asked"


def test_a_server_that_refuses_is_no_result_but_a_failure(runner, tmp_path, capsys):
    fake = runner("refused")
    fake.start()
    measured = fake.measure(load(tmp_path))
    assert (measured.failed, measured.tokens_per_s) == (8, 0)
    assert "I would rather not" in measured.first_error
    assert "warm-up failed" in capsys.readouterr().err


def test_a_server_that_cannot_start_says_why(runner):
    with pytest.raises(DidNotStart, match="no memory for the weights"):
        runner("dies").start()


def test_one_that_does_not_start_leaves_the_others_their_turns(runner, tmp_path):
    good, bad = runner(), runner("dies")
    bad.name = "bad"
    work = Work(ModelShape(1, 1, 1, 8, 8, 512, 8192), 10_000, is_tied=True)
    turns = Turns([bad, good], Results(["A8"]), work)
    turns.start_all()
    turns.round(0, [load(tmp_path)])
    assert list(turns.results.servers) == ["fake"]
    (measured,) = turns.results.servers["fake"].rounds["A8"]
    assert measured.failed == 0
    assert turns.results.x_of_floor("fake", "A8") > 0


def test_without_splitflap_there_is_nothing_to_compare(runner):
    ours = runner("dies")
    ours.name = "splitflap"
    work = Work(ModelShape(1, 1, 1, 8, 8, 512, 8192), 10_000, is_tied=True)
    with pytest.raises(SystemExit, match="splitflap: not ready"):
        Turns([ours], Results(["A8"]), work).start_all()


def test_a_server_that_died_is_started_again_for_its_next_turn(runner, tmp_path):
    fake = runner()
    work = Work(ModelShape(1, 1, 1, 8, 8, 512, 8192), 10_000, is_tied=True)
    turns = Turns([fake], Results(["A8"]), work)
    turns.start_all()
    fake.stop()
    turns.round(0, [load(tmp_path)])
    (measured,) = turns.results.servers["fake"].rounds["A8"]
    assert (measured.failed, fake.is_alive()) == (0, True)


def test_memory_of_a_pool_is_told_apart():
    """64 MiB that nobody touches count nowhere; what is written counts, and as the pool's."""
    pool = torch.empty(64 * MIB, dtype=torch.uint8)
    me = [os.getpid()]
    before = resident_in_mappings_of(me, 64 * MIB)
    pool[: 32 * MIB].fill_(1)
    touched = resident_in_mappings_of(me, 64 * MIB) - before
    assert 32 * MIB <= touched < 40 * MIB
    with PeakMemory(lambda: me, 64 * MIB + memory.EDGES) as seen:
        pass
    assert seen.peak - seen.peak_without_pool >= 32 * MIB


def test_a_process_that_is_gone_has_no_memory():
    assert tree(2**22 + 1) == []
    assert memory.pss_bytes([2**22 + 1]) == 0
    assert memory.cpu_s([2**22 + 1]) == 0


class RecordingInterpreter(Interpreter):
    """A class of its own, as recording changes the class."""


def interpreter(kind=Interpreter):
    return kind(ToyModel(), KVPools(ToyModel(), 4, 16), max_model_len=64)


def test_recorded_plans_are_written_read_and_replayed(tmp_path):
    recorded = []
    record(RecordingInterpreter, recorded)
    hands = interpreter(RecordingInterpreter)
    plans = [plan(row((65, 66)), step_id=1), plan(row((67,), first_position=2), step_id=2)]
    results = [hands.run(plans[0]), hands.finish(hands.launch(plans[1]))]  # both ways are recorded
    assert not any(isinstance(result, StepFailed) for result in results)
    write(recorded, tmp_path / "plans")
    again = list(read(tmp_path / "plans"))
    assert [one.plan for one in again] == plans
    assert again == recorded
    assert all(one.began_s <= one.ended_s for one in again)
    seconds = replay(interpreter(), again)
    assert len(seconds) == 2
    assert len(replay(interpreter(), again)) == 2, "a replay can be repeated"


def test_a_server_writes_down_the_plans_of_its_load(tmp_path):
    (span,), _ = serve([load(tmp_path, "A1")], ["--model=toy", "--dtype=auto"], tmp_path)
    recorded = list(read(tmp_path / "plans"))
    assert len(span.plans(recorded)) > 64, "a plan for each token of an answer, at least"
    assert all(one.plan.rows for one in recorded)


def test_a_plan_that_fails_in_the_replay_is_told():
    broken = Recorded(plan(row(block_table=(99,)), step_id=5), 0.0, 0.0)
    with pytest.raises(SystemExit, match="step 5 fails in the replay"):
        replay(interpreter(), [broken])


def test_the_share_is_of_the_plans_of_that_load_alone():
    recorded = [
        Recorded(plan(step_id=at), began_s, began_s + 0.5)
        for at, began_s in enumerate((1.0, 10.0, 11.0, 20.0))
    ]
    table = write_shares([Span("A1", 9.0, 13.0)], recorded, [[9, 0.4, 0.4, 9], [9, 1.0, 1.0, 9]])
    assert table.splitlines()[1].split() == ["A1", "2", "4.00", "1.00", "0.25", "1.40", "0.35"]


def test_the_replay_has_the_pools_that_the_server_had():
    log = """{"blocks": 10, "block_size": 16, "max_model_len": 64, "event": "pool: 10 blocks"}
listening
{"blocks": 3, "event": "swap space: 3 blocks"}
{"threads": 2, "event": "executor_ready"}
"""
    assert Pools.of(log) == Pools(10, 16, 64, 3, 2)
    with pytest.raises(SystemExit, match="pool"):
        Pools.of("")


def test_servers_are_started_where_the_modules_are():
    assert (ROOT / "services" / "cli.py").exists()
    assert Path(sys.executable).exists()
