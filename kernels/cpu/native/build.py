"""The native library of this CPU: built by a C++ compiler at install, found in a cache at start.

Its name is a digest of all it depends on: the sources, the flags, the CPU and its features. It is
looked for beside the sources first (filled at install, may be read-only), then in the user's cache
folder. Where it cannot be built, a note of the reason lies in its place, so that no start tries
again; `python -m kernels.cpu.warm_up` does. A library in either folder counts more than a note.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import llvmlite.binding as llvm

from shared.logs import get_logger

log = get_logger("kernels")

FLAGS: Final = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"),
)
COMPILERS: Final = ("g++", "clang++")
_MAIN: Final = "native.cpp"
_HERE: Final = Path(__file__).parent
_LONGEST_BUILD_S: Final = 600


class NotBuilt(Exception):
    """There is no native library; the text says why."""


def library(extra_flags: tuple[str, ...] = (), *, retry: bool = False) -> Path:
    """The library's file: from the cache, or built now and cached.

    Args:
        extra_flags: more flags for the compiler, for a library other than the default one.
        retry: build it even if it could not be built before.
    Raises: NotBuilt with the reason.
    """
    name = _file_name(extra_flags)
    for folder in _folders():
        if (folder / name).is_file():
            return folder / name
    for folder in _folders():  # only now: who built a library may not have been let remove a note
        note = (folder / name).with_suffix(".failed")
        if not retry and note.is_file():
            raise NotBuilt(note.read_text(encoding="utf-8").strip())
    return _build_into_cache(name, extra_flags)


def compiler() -> list[str]:
    """`$CXX` in words (`ccache g++`), or the first of g++ and clang++ that is there.

    Raises: NotBuilt if none is.
    """
    asked = os.environ.get("CXX", "").strip()
    for candidate in (asked,) if asked else COMPILERS:
        program, *more = candidate.split()
        if found := shutil.which(program):
            return [found, *more]
    raise NotBuilt(f"no C++ compiler: {asked or ' or '.join(COMPILERS)} is not there")


def _build_into_cache(name: str, extra_flags: tuple[str, ...]) -> Path:
    reasons = []
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".so") as file:
                try:
                    _compile(Path(file.name), extra_flags)
                except NotBuilt as error:
                    (folder / name).with_suffix(".failed").write_text(str(error), encoding="utf-8")
                    raise
                os.chmod(file.name, 0o755)  # who serves need not be who installed
                os.link(file.name, f"{file.name}.done")
                os.replace(f"{file.name}.done", folder / name)
            (folder / name).with_suffix(".failed").unlink(missing_ok=True)
        except OSError as error:
            reasons.append(f"{folder} cannot be written: {error}")
        else:
            return folder / name
    raise NotBuilt("; ".join(reasons))


def _compile(target: Path, extra_flags: tuple[str, ...]) -> None:
    command = compiler()
    cxx = " ".join(command)
    started = time.monotonic()
    log.info("building_native_kernels", compiler=cxx)
    command += [*FLAGS, *extra_flags, "-o", str(target), str(_HERE / _MAIN)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_BUILD_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{cxx} cannot be run: {error}") from error
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["it says nothing"]
        raise NotBuilt(f"{cxx} failed with exit status {done.returncode}: {told[0]}")
    log.info("built_native_kernels", took_s=round(time.monotonic() - started, 1))


def _file_name(extra_flags: tuple[str, ...]) -> str:
    features = llvm.get_host_cpu_features().flatten()
    told = [*FLAGS, *extra_flags, llvm.get_host_cpu_name(), features]
    digest = hashlib.sha256("\n".join(told).encode())
    for source in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return f"native-{digest.hexdigest()[:24]}.so"


def _folders() -> Iterator[Path]:
    yield _HERE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitflap"
