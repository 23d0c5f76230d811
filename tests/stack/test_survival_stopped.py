"""Processes that stand still, as a whole or in part, and are ended and replaced under load.

SIGSTOP silences a process; a thread that computes and hangs does not. What streams tell is
compared, to the token, with what they tell undisturbed.
"""

import signal

import pytest

from shared.liveness import SILENCE_S
from tests.stack.crew import crew
from tests.stack.stack import counted, fetch, start, until, wait_ready
from tests.stack.travelling import WISHES, Load, calm_answers, wishes

pytestmark = pytest.mark.stack

LIMIT_S = 2.0
"""Shorter than the silence that would tell, and long for a step of 15 ms."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = start(
        tmp_path_factory.mktemp("stopped"), "--model", "toy", "--toy-step-ms", "15",
        "--num-gpu-blocks-override", "1000", "--step-timeout", str(LIMIT_S),
    )  # fmt: skip
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def asked(stack):
    return wishes(stack)


@pytest.fixture(scope="module")
def calm(stack, asked):
    return calm_answers(stack, asked)


@pytest.fixture
def nothing_is_left(stack):
    wait_ready(stack)
    yield
    until(stack.is_idle, "idle")
    assert stack.unheld() == 1000


def changed(before, after):
    return {name for name in before if before[name].pid != after[name].pid}


def test_a_stopped_executor_is_found_by_its_progress_ended_and_replaced(
    stack, asked, calm, nothing_is_left
):
    """SIGSTOP. The step that is due tells before silence does, and its guard ends it."""
    before = stack.children()
    with counted(stack) as grown:
        load = Load([stack], asked)
        until(load.are_all_under_way, "all are told something")
        before["executor"].send_signal(signal.SIGSTOP)
        assert load.results() == calm
    assert changed(before, stack.children()) == {"executor"}
    assert grown["step_timeouts_total"] == grown["executor_restarts_total"] == 1
    assert grown["executors_adopted_total"] == 1
    assert grown["steps_lost_total"] >= 1
    said = stack.log.read_text()
    assert f"no step came back for {LIMIT_S:.0f}." in said
    assert "silent for" not in said
    assert "standstill" in said


def test_a_scheduler_that_stood_still_blames_nobody(stack, asked, calm, nothing_is_left):
    """SIGSTOP for longer than any limit, SIGCONT: its own pause is no sign of a hanging step."""
    before = stack.children()
    with counted(stack) as grown:
        load = Load([stack], asked)
        until(load.are_all_under_way, "all are told something")
        before["scheduler"].send_signal(signal.SIGSTOP)
        until(lambda: fetch(stack.url + "/health/ready")[0] == 503, "the gateway hears nothing")
        before["scheduler"].send_signal(signal.SIGCONT)
        assert load.results() == calm
    assert changed(before, stack.children()) == set()
    assert grown["step_timeouts_total"] == 0
    assert "stood_still" in stack.log.read_text()


def test_gateway_and_scheduler_stopped_at_once_are_ended_and_replaced(
    stack, asked, calm, nothing_is_left
):
    """SIGSTOP: connections stay open and nobody is behind them, until their guards end both."""
    before = stack.children()
    load = Load([stack], asked)
    until(load.are_all_under_way, "all are told something")
    assert stack.metrics()["num_requests_running"] >= len(asked)
    before["gateway"].send_signal(signal.SIGSTOP)
    before["scheduler"].send_signal(signal.SIGSTOP)
    assert load.results() == calm
    assert {len(one.readers) for one in load.travellers} == {2}, "each came back once"
    assert changed(before, stack.children()) == {"gateway", "scheduler"}
    said = stack.log.read_text()
    for name in ("gateway", "scheduler"):
        assert f"killed={name}" in said


def test_an_executor_that_beats_on_and_computes_nothing_is_given_up(tmp_path):
    """The thread that computes hangs, the one that talks does not: silence never tells.

    The limit is longer than the silence that would; so it was heard all the time.
    """
    limit_s = SILENCE_S + 1.5
    flags = {"scheduler": ("--step-timeout", str(limit_s)), "executor": ("--toy-step-ms", "5")}
    asked = {name: WISHES[name] for name in ("several answers", "a chat", "beams")}
    with crew(
        tmp_path, executor=("tests.stack.faulty_executor", "hang", str(tmp_path)), flags=flags
    ) as one:
        told = calm_answers(one, asked)  # nothing of it comes before the fault
        assert (tmp_path / "struck-hang").exists()
        assert one.ends["executor"] == [-signal.SIGKILL]
        metrics = one.metrics()
        assert metrics["step_timeouts_total"] == metrics["executor_restarts_total"] == 1
        assert metrics["executors_adopted_total"] == 2
        assert metrics["steps_lost_total"] >= 1
        assert f"no step came back for {limit_s:.0f}" in one.said("scheduler")
        assert "silent for" not in one.said("scheduler")
        assert "draining" in one.said("executor")
        assert "standstill" in one.said("executor")
        assert calm_answers(one, asked) == told
        until(one.is_idle, "idle")
