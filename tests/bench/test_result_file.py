"""The file of a result: refused before a run, or surely written after it."""

import json

import pytest

from services.bench.result_file import ResultFile
from services.bench.run import Run
from services.bench.settings import load_settings
from shared.errors import StartError

RAN = Run("org/the-model", start_s=0.0, duration_s=1.0, was_interrupted=False, recordings=())


def file_of(folder, *flags):
    return ResultFile(load_settings(["--save-result", "--result-dir", str(folder), *flags]))


def test_nothing_is_left_behind_before_there_is_a_result(tmp_path):
    file = file_of(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    path = file.write(RAN, {"completed": 3})
    assert path.name.startswith("openai-infqps-the-model-")
    assert json.loads(path.read_text())["completed"] == 3


def test_a_result_is_written_over_the_last_one_and_not_before(tmp_path):
    (tmp_path / "result.json").write_text("the last one")
    file = file_of(tmp_path, "--result-filename", "result.json")
    assert (tmp_path / "result.json").read_text() == "the last one"
    assert json.loads(file.write(RAN, {}).read_text())["model_id"] == "org/the-model"


@pytest.mark.parametrize("label", ["a/b", "../up", "/", "x" * 300, "\N{SNOWMAN}" * 100])
def test_any_label_makes_a_name(label, tmp_path):
    path = file_of(tmp_path, "--label", label).write(RAN, {})
    assert path.parent == tmp_path
    assert json.loads(path.read_text())["label"] == label


@pytest.mark.parametrize(
    ("folder", "flags"),
    [
        ("/proc/self", ()),  # not even root makes files there
        ("/dev/null", ()),
        (".", ("--result-filename", "folder")),
        (".", ("--result-filename", "file/result.json")),
        (".", ("--result-filename", "x" * 300)),
    ],
)
def test_what_cannot_be_written_is_said_at_once(folder, flags, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"cannot be written to .*choose another --result-dir"):
        file_of(tmp_path / folder, *flags)
