"""The native library: built once, found again, and done without where it cannot be built."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu.native import build, library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and one small source instead of ours."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    folder = tmp_path / "cache"
    monkeypatch.setattr(build, "_MAIN", str(source))
    monkeypatch.setattr(build, "_folders", lambda: iter([folder]))
    return folder


def test_what_is_built_once_is_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.library()
    assert ctypes.CDLL(str(path)).seven() == 7
    assert [path] == list(cache.iterdir())
    assert path.stat().st_mode & 0o555 == 0o555
    monkeypatch.setenv("CXX", "/bin/false")
    assert build.library() == path


def test_other_flags_are_another_library(cache: Path) -> None:
    assert build.library() != build.library(("-DOTHER",))


def test_a_compiler_may_be_several_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = build.compiler()
    monkeypatch.setenv("CXX", " ")
    assert build.compiler() == usual
    monkeypatch.setenv("CXX", f"env SEEN=1 {usual[0]} -w")
    assert build.compiler()[1:] == ["SEEN=1", usual[0], "-w"]
    assert ctypes.CDLL(str(build.library())).seven() == 7


def test_a_compiler_that_fails_is_not_asked_again_until_told_to(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(build.NotBuilt, match="/bin/false failed with exit status 1"):
        build.library()
    monkeypatch.delenv("CXX")
    with pytest.raises(build.NotBuilt, match="/bin/false failed with exit status 1"):
        build.library()
    path = build.library(retry=True)
    assert build.library() == path
    assert [path] == list(cache.iterdir())


def test_an_old_failure_in_one_folder_hides_no_library_in_another(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setenv("CXX", "/bin/false")
        with pytest.raises(build.NotBuilt, match="/bin/false failed"):
            build.library()
    assert [path.suffix for path in cache.iterdir()] == [".failed"]
    users = tmp_path / "users"
    with monkeypatch.context() as later:  # somebody who may not write into the first
        later.setattr(build, "_folders", lambda: iter([users]))
        path = build.library()
    monkeypatch.setattr(build, "_folders", lambda: iter([cache, users]))
    assert build.library() == path
    assert path.parent == users
    path.unlink()
    with pytest.raises(build.NotBuilt, match="/bin/false failed"):
        build.library()


def test_a_user_without_a_home_gets_the_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setattr(build, "_MAIN", "small.cpp")
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("CXX", "/bin/false")
    for _ in range(2):  # the second time from the note
        with pytest.raises(build.NotBuilt, match="/bin/false failed with exit status 1"):
            build.library()


def test_a_compiler_that_is_not_there_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "c++-of-nobody")
    with pytest.raises(build.NotBuilt, match="no C\\+\\+ compiler: c\\+\\+-of-nobody is not there"):
        build.library()


def test_a_cache_that_cannot_be_written_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder would be")
    with pytest.raises(build.NotBuilt, match="cannot be written"):
        build.library()


def test_a_library_of_something_else_is_refused(cache: Path) -> None:
    with pytest.raises(build.NotBuilt, match="cannot be loaded"):
        library.load(str(build.library()))


def test_without_a_compiler_numba_serves_and_one_line_says_so(tmp_path: Path) -> None:
    script = (
        "import pathlib, torch\n"
        "from kernels.cpu.native import build\n"
        f"build._folders = lambda: iter([pathlib.Path({str(tmp_path)!r})])\n"
        "from kernels.select import select_kernels\n"
        "print(select_kernels(torch.device('cpu'), torch.float32).name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=os.environ | {"CXX": "/bin/false"}, check=True,
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.stdout.split()[-1] == "cpu"
    assert told.count("native_kernels_unavailable") == 1
    assert "/bin/false failed" in told
