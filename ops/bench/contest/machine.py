"""What machine this is, for whoever reads the numbers elsewhere."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TOLD_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "pyzmq", "aiohttp")


def machine() -> dict[str, object]:
    """Processor, memory, system, versions; no name of the host and no path."""
    processor = _fields("/proc/cpuinfo")
    memory_kb = int(_fields("/proc/meminfo").get("MemTotal", "0").split()[0])
    features = (processor.get("flags") or processor.get("Features") or "").split()
    return {
        "processor": processor.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "features": [name for name in TOLD_FEATURES if name in features],
        "memory_gib": round(memory_kb / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def busy_cores_elsewhere() -> float:
    """Load of the last minute, to judge whether the machine was quiet before a run."""
    return os.getloadavg()[0]


def _fields(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    split = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in split}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
