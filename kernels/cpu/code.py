"""Machine code of the CPU bodies: from the cache, or compiled now and cached.

One file a kind, named by a digest of everything the code depends on: these sources, the
compiler's version, the CPU and its features. It is looked for beside the sources first (filled at
install, may be read-only), then in the user's cache folder.
"""

import ctypes
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal

import llvmlite.binding as llvm
import torch

from shared.logs import get_logger

log = get_logger("kernels")

Kind = Literal["bf16", "f32", "team"]

_MAGIC: Final = b"splitflap machine code 1\n"
_SOURCES: Final = (
    "arguments.py",
    "attention.py",
    "compile.py",
    "copying.py",
    "elementwise.py",
    "microkernels.py",
    "product.py",
    "synchronise.py",
    "team.py",
    "tiles.py",
    "vector.py",
)
_ERROR_PATH: Final = (
    "NRT_Free",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
_SIGNATURE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Body:
    """One compiled function: takes the address of its argument block."""

    def __init__(self, symbol: str, code: bytes) -> None:
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()  # one engine each: symbols of two objects may be the same
        self.address = self._engine.get_function_address(symbol)
        self.run_here = _SIGNATURE(self.address)


@cache
def bodies(kind: Kind) -> dict[str, Body]:
    """All bodies of a dtype, or of what knows none: the team and copies; ready to run."""
    objects = _from_cache(kind)
    if objects is None:
        started = time.monotonic()
        log.info("compiling_kernels", kind=kind, why="no machine code for this CPU in the cache")
        from kernels.cpu.compile import compile_bodies

        objects = compile_bodies(kind)
        log.info("compiled_kernels", kind=kind, took_s=round(time.monotonic() - started, 1))
        _to_cache(kind, objects)
    _start_llvm()
    return {name: Body(*parts) for name, parts in objects.items()}


def kind_of(dtype: torch.dtype) -> Kind:
    """The bodies a dtype needs."""
    return "bf16" if dtype == torch.bfloat16 else "f32"


@cache
def _start_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in _ERROR_PATH:  # one that is not found leaves all others unfound, libc's too
        if llvm.address_of_symbol(name) is None:  # numba itself, where loaded, has them
            llvm.add_symbol(name, abort)  # its error path, which our bodies cannot take


@cache
def _file_name(kind: Kind) -> str:
    features = llvm.get_host_cpu_features().flatten()
    told = [version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), features]
    digest = hashlib.sha256("\n".join(told).encode())
    for source in _SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    return f"{kind}-{digest.hexdigest()[:24]}.machinecode"


def _folders() -> Iterator[Path]:
    yield Path(__file__).parent / "__pycache__"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield Path(base) / "splitflap"


def _from_cache(kind: Kind) -> dict[str, tuple[str, bytes]] | None:
    for folder in _folders():
        path = folder / _file_name(kind)
        try:
            return _unpack(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("kernel_cache_unreadable", path=str(path), error=str(error))
    return None


def _to_cache(kind: Kind, objects: dict[str, tuple[str, bytes]]) -> None:
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(_pack(objects))
            os.chmod(file.name, 0o644)  # who serves need not be who installed
            os.replace(file.name, folder / _file_name(kind))
        except OSError as error:
            log.info("kernel_cache_not_writable", folder=str(folder), error=str(error))
        else:
            return


def _pack(objects: dict[str, tuple[str, bytes]]) -> bytes:
    header = [[name, symbol, len(code)] for name, (symbol, code) in objects.items()]
    body = json.dumps(header).encode() + b"\n" + b"".join(code for _, code in objects.values())
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(packed: bytes) -> dict[str, tuple[str, bytes]]:
    magic, rest = packed[: len(_MAGIC)], packed[len(_MAGIC) :]
    digest, body = rest[:32], rest[32:]
    if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
        raise ValueError("the file is damaged")
    header, _, rest = body.partition(b"\n")
    objects = {}
    for name, symbol, length in json.loads(header):
        objects[name] = (symbol, rest[:length])
        rest = rest[length:]
    return objects
