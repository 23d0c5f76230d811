"""The arithmetic of a run, on given times, and how it is written down."""

import json

import pytest

from services.bench.report import percentile, summarize
from services.bench.table import report_json, request_json, write_table
from tests.bench.stamped import DONE, judged, recording, said, used

ALL = ("ttft", "tpot", "itl", "e2el")


def answer(start, first, gap, tokens):
    """An answer of one token an event, the first after `first` seconds, then one each `gap`."""
    times = [start + first + gap * index for index in range(tokens)]
    events = [(time, said("x")) for time in times]
    return judged(*events, (times[-1], used(tokens)), (times[-1], DONE), start=start)


FAST = answer(start=100.0, first=0.1, gap=0.1, tokens=3)
SLOW = answer(start=101.0, first=0.5, gap=0.2, tokens=2)
FAILED = judged((103.0, b"busy"), start=102.0, status=429)


def report(*outcomes, duration_s=4.0, **goodput_s):
    return summarize(outcomes, duration_s=duration_s, unfinished=1, goodput_s=goodput_s)


def test_a_run_is_added_up():
    run = report(FAST, SLOW, FAILED)
    assert (run.completed, run.failed, run.unfinished) == (2, 1, 1)
    assert (run.prompt_tokens, run.output_tokens) == (20, 5)
    assert run.per_s(run.output_tokens) == 1.25
    assert run.errors == {"HTTP 429": 1}
    assert run.first_error == "HTTP 429: busy"
    assert run.tokens_per_event == 1
    assert run.counted_by == {"usage": 2}
    assert run.samples_s["ttft"] == pytest.approx([0.1, 0.5])
    assert run.samples_s["tpot"] == pytest.approx([0.1, 0.2])
    assert run.samples_s["itl"] == pytest.approx([0.1, 0.1, 0.2])
    assert run.samples_s["e2el"] == pytest.approx([0.3, 0.7])
    assert run.normalized_s == pytest.approx((0.3 / 3 + 0.7 / 2) / 2)


def test_the_peak_counts_tokens_by_the_second():
    assert report(FAST, SLOW).peak_output_tokens_s == 3


def test_the_peak_counts_every_token_of_an_event():
    six = judged((100.2, said("x")), (100.9, said("x")), (101.3, said("x")), (101.4, used(6)),
                 (101.4, DONE), start=100.0, max_tokens=6)  # fmt: skip
    assert report(six).peak_output_tokens_s == 4  # two of three events, two tokens each
    assert report(six, FAST).peak_output_tokens_s == 7


def test_requests_that_overlap_are_concurrent():
    assert report(FAST, SLOW).peak_concurrency == 1
    assert report(FAST, answer(100.2, 0.1, 0.1, 2), FAILED).peak_concurrency == 2


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 0.2}, 1),
        ({"ttft": 0.6}, 2),
        ({"tpot": 0.15}, 1),
        ({"ttft": 0.2, "tpot": 0.05}, 0),
        ({"e2el": 0.5, "ttft": 1}, 1),
    ],
)
def test_only_requests_within_every_limit_are_good(limits, good):
    assert report(FAST, SLOW, FAILED, **limits).good == good


def test_percentiles_lie_between_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile([7.0], 99) == 7.0


def test_the_table_says_it_all():
    table = write_table(report(FAST, SLOW, FAILED, ttft=0.2), ALL, [90, 99.9], title="Result")
    for line in (
        "Successful requests:                     2",
        "Failed requests:                         1",
        "Unfinished requests:                     1",
        "Benchmark duration (s):                  4.00",
        "Tokens counted by:                       the server's usage",
        "Request throughput (req/s):              0.50",
        "Request goodput (req/s):                 0.25",
        "Output token throughput (tok/s):         1.25",
        "Total token throughput (tok/s):          6.25",
        "Mean normalized latency (ms/tok):        225.00",
        "Mean TTFT (ms):                          300.00",
        "Median TTFT (ms):                        300.00",
        "P90 TTFT (ms):                           460.00",
        "P99.9 E2EL (ms):                         699.60",
        "Errors: 1 x HTTP 429. The first: HTTP 429: busy",
    ):
        assert line in table.splitlines()


def test_the_median_is_told_once():
    table = write_table(report(FAST, SLOW), ALL, [50, 90], title="Result")
    assert table.count("Median TTFT (ms):") == 1
    assert "P50" not in table


def test_a_run_of_failures_has_a_table_too():
    run = report(FAILED)
    table = write_table(run, ALL, [99], title="Result")
    assert "TTFT (ms):                               none" in table
    assert json.dumps(report_json(run, ALL, [99]))
    assert write_table(report(duration_s=0.0), ALL, [99], title="Nothing")


def test_the_json_has_vllms_names():
    fields = json.loads(json.dumps(report_json(report(FAST, SLOW, FAILED), ALL, [50, 99])))
    assert fields["completed"] == 2
    assert fields["output_throughput"] == 1.25
    assert fields["total_token_throughput"] == 6.25
    assert fields["mean_ttft_ms"] == pytest.approx(300)
    assert fields["p50_ttft_ms"] == fields["median_ttft_ms"]
    assert fields["std_itl_ms"] == pytest.approx(47.14, abs=0.01)
    assert fields["request_goodput"] is None


def test_each_request_can_be_told():
    seen = recording(start=100.0)
    seen.arrival_s = 99.5
    fields = json.loads(json.dumps(request_json(seen, FAST, origin_s=99.0)))
    assert (fields["arrival"], fields["start"]) == (0.5, 1.0)
    assert fields["texts"] == ["xxx"]
    assert fields["error"] is None
    failure = request_json(seen, FAILED, origin_s=99.0)
    assert failure["error"] == {"kind": "HTTP 429", "message": "busy"}
