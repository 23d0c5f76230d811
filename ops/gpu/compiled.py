"""What the launches of the back end compile to for a GPU, on a machine that has none.

Run as `python -m ops.gpu.compiled TARGET [WHAT ...]`; prints a JSON object, a kernel a key. A
target is 80, 90, 100 (NVIDIA's sm_...) or gfx942. Nothing is run: the launcher specialises each
kernel for its arguments as it would on the GPU, and the tools in Triton's wheel compile it.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.interface import PoolSpec
from kernels.triton_gpu import blocks
from kernels.triton_gpu.backend import E4M3, Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from kernels.triton_gpu.sampling import Draws, sample
from kernels.triton_gpu.step import StepRows
from kernels.triton_gpu.tiles import SHARED_A100, SHARED_H100, SHARED_MI300
from ops.gpu.batches import pack
from shared.geometry import ModelShape

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHARED: Final = {"80": SHARED_A100, "90": SHARED_H100, "100": SHARED_H100, "gfx942": SHARED_MI300}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Compiled:
    """Of one kernel: bytes of shared memory, registers and spills a thread, instructions by name.

    `spilled` is bytes of stack, and of registers stored and loaded again.
    """

    shared: int
    registers: int
    spilled: int
    instructions: dict[str, int]


class NoGpu:
    """Answers what the launcher asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the arguments lie."""
        return CPU


@contextmanager
def captured(target: str) -> Iterator[list[tuple[str, Compiled]]]:
    """Every launch inside is compiled for `target`, and listed instead of run."""
    launches: list[tuple[str, Compiled]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        self.device_caches.clear()  # they remember the driver
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        launches.append((self.__name__, read(kernel)))
        return kernel

    is_amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target), 32)
    driver.set_active(NoGpu(gpu))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run


def read(kernel: Any) -> Compiled:
    """What came out of the compiler."""
    if "cubin" not in kernel.asm:
        return read_amd(kernel)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage = output_of("cuobjdump", "-res-usage", str(binary))
        code = output_of("nvdisasm", "-c", str(binary))
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    instructions = Counter(INSTRUCTION.findall(code))
    local = sum(n for name, n in instructions.items() if name.startswith(("LDL", "STL")))
    spilled = int(found[2]) + int(found[3]) + 4 * local
    return Compiled(kernel.metadata.shared, int(found[1]), spilled, dict(instructions))


def read_amd(kernel: Any) -> Compiled:
    """The same of a kernel for an AMD GPU."""
    code = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])  # type: ignore[index]

    spilled = number("vgpr_spill_count") + number("private_segment_fixed_size")
    instructions = Counter(re.findall(r"^\s+([a-z][a-z0-9_]+)\s", code, re.MULTILINE))
    return Compiled(kernel.metadata.shared, number("vgpr_count"), spilled, dict(instructions))


def output_of(tool: str, *args: str) -> str:
    """What a tool of NVIDIA's says, from Triton's wheel."""
    done = subprocess.run([str(TOOLS / tool), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def launch_all(target: str) -> dict[str, Callable[[], object]]:
    """By name, what launches kernels for Llama-3-8B's shapes in bfloat16."""
    gpu = Gpu(SHARED[target], has_e4m3=target in ("90", "100"))
    kernels, exact = TritonKernels(torch.bfloat16, gpu), TritonKernels(torch.float32, gpu)
    shape = ModelShape(1, HEADS, KV_HEADS, HEAD_DIM, 4096, 1000, 8192)

    def pool(dtype: torch.dtype) -> torch.Tensor:
        return blocks.allocate(PoolSpec(shape, 64, 16, dtype, CPU), Layout.BLOCK_MAJOR, CPU)

    def attend(
        rows: tuple[tuple[int, int], ...], dtype: torch.dtype, kernels: TritonKernels = kernels
    ) -> object:
        packed = pack(rows, 16, list(range(64)), torch.Generator())
        batch = kernels.step_layout(shape, dtype, (None,)).on(CPU, StepRows.of(packed))
        queries = torch.empty(len(batch.positions), HEADS, HEAD_DIM, dtype=kernels.dtype)
        return kernels.paged_attention(pool(dtype), 0, queries, batch, 0.088)

    def write(dtype: torch.dtype) -> object:
        qkv = torch.empty(4, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        keys, values = qkv[:, HEADS:].chunk(2, dim=1)
        return kernels.write_kv(pool(dtype), 0, keys, values, torch.arange(4))

    def draw() -> object:
        logits = torch.zeros(2, 128_256)
        floats, doubles = torch.ones(2), torch.ones(2, dtype=torch.float64)
        ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        return sample(logits, Draws(ints, floats, ints, doubles, floats, longs, longs, longs))

    def copy() -> object:
        some = pool(torch.bfloat16)
        return kernels.copy_blocks(some, some, torch.zeros(3, 2, dtype=torch.int64))

    return {
        "decode": lambda: attend(((900, 1), (90, 1)), torch.bfloat16),
        "prefill": lambda: attend(((300, 200),), torch.bfloat16),
        "decode float32": lambda: attend(((900, 1),), torch.float32, exact),
        "prefill float32": lambda: attend(((300, 200),), torch.float32, exact),
        "decode e4m3": lambda: attend(((300, 1),), E4M3),
        "write": lambda: write(torch.bfloat16),
        "write e4m3": lambda: write(E4M3),
        "copy": copy,
        "sample": draw,
    }


def main() -> None:
    """Compile for the target named, and print what came out."""
    target, *wanted = sys.argv[1:]
    report = {}
    for name, launch in launch_all(target).items():
        if wanted and name not in wanted:
            continue
        with captured(target) as launches:
            launch()
        for kernel, compiled in launches:
            report[f"{name}: {kernel}"] = asdict(compiled)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
