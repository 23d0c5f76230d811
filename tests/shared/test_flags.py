"""--help: every flag has a text, and no word of Python's."""

import pytest

from services.bench.settings import BenchSettings
from shared.errors import StartError
from shared.flags import HIDDEN, help_text
from shared.settings import (
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    UpSettings,
    load,
)

ALL = [UpSettings, GatewaySettings, SchedulerSettings, ExecutorSettings, BenchSettings]


@pytest.mark.parametrize("settings_class", ALL, ids=lambda each: each.__name__)
def test_every_flag_has_a_text_and_no_word_of_pythons(settings_class):
    told = help_text(settings_class, "splitflap")
    for name, field in settings_class.model_fields.items():
        assert field.description, name
        is_told = f"  --{name.replace('_', '-')}" in told
        assert is_told == (field.json_schema_extra != HIDDEN), name
    for word in ("lambda", "default: null", "None", "tuple", "()", "Annotated", "class"):
        assert word not in told


def test_help_is_printed_with_choices_and_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        load(UpSettings, ["--port", "wrong", "--help"], "splitflap up")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--log-format {console,json}" in told
    assert "(default: 8000)" in told
    assert "(default: 0.0)" in told
    assert "off with --no-enable-prefix-caching" in " ".join(told.split())
    assert "--metrics-port" not in told.replace("scheduler-metrics", "").replace("executor-m", "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prot", "1"], "--prot: is no flag of this command; did you mean --port\\?"),
        (["--max-num-seq=3"], "did you mean --max-num-seqs"),
        (["--gpu-memory-utilization", "1.5"], "must be (at most 1|less than or equal to 1)$"),
        (["--zzzzzz"], "leave it out"),
        (["--log-level", "loud"], "'loud': choose from debug, info, warning, error$"),
        (["--max-pinned-share", "1.5"], "--max-pinned-share '1.5': must be below 1$"),
        (["--watermark", "-1"], "--watermark '-1': must be at least 0$"),
        (["--max-num-seqs", "0"], "--max-num-seqs '0': must be (above 0|at least 1)$"),
        (["--max-num-seqs", "some"], "--max-num-seqs 'some': must be an integer$"),
        (["--watermark", "some"], "--watermark 'some': must be a number$"),
    ],
)
def test_what_was_meant_is_said(flags, said):
    with pytest.raises(StartError, match=said):
        load(UpSettings, flags, "splitflap up")
