"""Parts of the GPU check that only a GPU would reach, with a GPU that is made up."""

import doctest
import io
import json
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels.triton_gpu.backend import Gpu
from kernels.triton_gpu.blocks import Layout
from ops.gpu import attention, correct_attention, prefill, report
from ops.gpu.section import GpuLost, Section
from ops.gpu.timing import device_s

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def section(*, is_dry=False, deadline=None, ceilings=None):
    deadline = time.monotonic() + 60 if deadline is None else deadline
    return Section(CPU, Gpu(), is_dry, deadline, ceilings or {}, io.StringIO())


def told(some):
    return report.by_kind(some.out.getvalue())


class MadeUp:
    """`torch.cuda`: each replay of a graph takes as many milliseconds as the next of `takes`."""

    def __init__(self, takes):
        self.takes, self.now, self.is_capturing, self.log = iter(takes), 0.0, False, []
        made_up = self

        class CUDAGraph:
            def replay(self):
                made_up.now += next(made_up.takes)
                made_up.log.append("replay")

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = made_up.now

            def synchronize(self):
                made_up.log.append("wait")

            def elapsed_time(self, other):
                return other.at - self.at

        class Stream:
            def wait_stream(self, other):
                pass

        self.CUDAGraph, self.Event, self.Stream = CUDAGraph, Event, Stream
        self.current_stream = Stream

    def synchronize(self):
        self.log.append("synchronize")

    @contextmanager
    def stream(self, stream):
        yield

    @contextmanager
    def graph(self, graph):
        self.is_capturing = True
        yield
        self.is_capturing = False


def test_calls_are_timed_by_replays_of_a_graph(monkeypatch):
    cuda = MadeUp([900, *([6] * 4), 60, *([8] * 5)])
    monkeypatch.setattr(torch, "cuda", cuda)
    calls = []
    each_s = device_s(CUDA, lambda i: calls.append((i, cuda.is_capturing)), 2)
    assert calls == [(0, False), (1, False), (0, True), (1, True)]
    assert cuda.log == ["synchronize", *["replay", "wait"] * 11]
    assert each_s == pytest.approx(0.008 / 2)  # the median of ten, the first left out


def test_a_lost_gpu_ends_a_section_and_other_errors_do_not():
    some = section()
    with some.guarded("sums"):
        raise ValueError("off by one")
    with pytest.raises(GpuLost), some.guarded("all of it"), some.guarded("loads"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert [fault["what"] for fault in told(some)["fault"]] == ["sums", "loads"]


def no_room(*_):
    raise OutOfResources(300_000, 232_448, "shared memory")


def test_what_a_gpu_has_no_room_for_is_no_fault_where_it_was_only_tried():
    some = section()
    with some.tried("128 keys"):
        no_room()
    with some.tried("64 keys"):
        raise ValueError("off by one")
    with some.guarded("32 keys"):
        no_room()
    left_out = [{"what": "128 keys", "why": "no room: shared memory, 300000 of 232448"}]
    assert told(some)["left_out"] == left_out
    assert [fault["what"] for fault in told(some)["fault"]] == ["64 keys", "32 keys"]


def test_a_back_ends_own_tile_must_work_and_others_need_not(monkeypatch):
    """Attention's section and prefill's, in which no kernel runs."""
    some = section(is_dry=True)
    monkeypatch.setattr(
        attention, "_told", lambda _, pool, one, tile: 1.0 if tile == one.tile else no_room()
    )
    attention.run(some)
    assert told(some)["fault"] == []
    num_tried = len(told(some)["left_out"])
    assert num_tried == 2 * len(Layout)
    monkeypatch.setattr(attention, "_told", no_room)
    monkeypatch.setattr(prefill, "_shapes", lambda is_dry: [prefill.Prefill(64)])
    monkeypatch.setattr(prefill, "_others", lambda one, chosen: [replace(chosen, stages=9)])
    monkeypatch.setattr(prefill, "_ours", no_room)
    for each in (attention, prefill):
        each.run(some)
    faults = [fault["what"] for fault in told(some)["fault"]]
    assert len(faults) == len(Layout) + len(attention._others(attention.Decode(batch=2))) + 1
    assert not any("9 stages" in what for what in faults)
    assert "9 stages" in told(some)["left_out"][-1]["what"]


def test_what_there_is_no_time_for_is_told():
    some = section(deadline=time.monotonic() - 1)
    assert not some.has_time("the rest")
    assert told(some)["left_out"] == [{"what": "the rest", "why": "no time left"}]


def test_targets_are_of_a_gpu_alone():
    for is_dry, count in ((False, 1), (True, 0)):
        some = section(is_dry=is_dry)
        some.target("attention", 85.0, "%", 80.0, is_met=True)
        assert len(told(some)["target"]) == count


def test_a_share_of_a_ceiling():
    assert section(ceilings={"copy": 4000.0}).of_ceiling(3000.0, "copy") == "75 % of copy"
    assert section().of_ceiling(3000.0, "copy") == "copy: not measured"


def test_the_table(capsys):
    some = section()
    some.row("copy", 4321.0, "GB/s", "read and written")
    some.row("product", 0.5, "TFLOP/s")
    some.left_out("batch 64", "no time left")
    some.left_out("batch 16", "no time left")
    some.target("a step", 1.4, "floors", 1.3, is_met=False)
    some.fault("draws", "token 3, not 4")
    cut = told(some) | report.by_kind(some.out.getvalue() + '{"kind": "fau')
    report.show("all", cut | {"took_s": 2.0})
    assert capsys.readouterr().out.splitlines() == [
        "",
        "all (2 s)",
        "  copy          4,321 GB/s   read and written",
        "  product         0.5 TFLOP/s",
        "  left out (no time left): batch 64 and 1 more",
        "  target MISSED: a step: 1.4 floors, aim 1.3",
        "  WRONG draws: token 3, not 4",
    ]


def test_what_is_measured_on_a_gpu_can_be_listed():
    """These lists are walked only there."""
    cases = correct_attention._cases(Gpu(has_e4m3=True))
    assert "e4m3 by hardware" in cases
    assert len(cases) == len(correct_attention._cases(Gpu())) + 1
    llama = attention.Decode()
    assert llama.layer_bytes == 2**30
    assert len(list(attention._tiles(llama, is_dry=False))) == 7
    assert len(attention._others(llama)) == 6
    assert len(list(prefill._shapes(is_dry=False))) == 6
    assert prefill.Prefill(2048).operations == pytest.approx(2 * 4096 * 2048**2, rel=1e-3)


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(report) == (0, 1)


def test_json_keeps_all_that_was_told():
    some = section()
    some.row("copy", 1.0, "GB/s", microseconds=3.0)
    whole = report.whole({"ceilings": told(some)}, is_dry=False, took_s=1.0)
    assert json.loads(json.dumps(whole))["sections"]["ceilings"]["row"][0]["microseconds"] == 3.0
    assert whole["is_right"]
