"""What a model computes on, and what may be asked of it there."""

from enum import Enum
from typing import Final

import torch

from shared.errors import StartError
from shared.settings import ExecutorSettings

CPU: Final = torch.device("cpu")


class Place(Enum):
    """CPU; a GPU; or a GPU's kernels in Triton's interpreter, on the CPU: for tests."""

    CPU = "cpu"
    GPU = "cuda"
    INTERPRETER = "interpreter"

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return torch.device("cuda") if self is Place.GPU else CPU


def place_of(settings: ExecutorSettings, *, is_toy: bool) -> Place:
    """What `--device` means: with auto a GPU if torch sees one, and for the toy the CPU.

    Raises: StartError for what the place does not have.
    """
    place = _named(settings.device, is_toy=is_toy)
    if place is not Place.GPU and "gpu_memory_utilization" in settings.model_fields_set:
        raise StartError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g}: no GPU is used here; "
            "leave it out, and say how large the KV pool is with --kv-cache-memory-bytes"
        )
    if place is Place.INTERPRETER:
        if settings.quantization is not None:
            raise StartError(
                f"--quantization {settings.quantization}: --device interpreter runs a GPU's "
                "kernels, which multiply weights in their own dtype; leave it out"
            )
        for flag, value, known in (
            ("--dtype", settings.dtype, ("auto", "float32")),
            ("--kv-cache-dtype", settings.kv_cache_dtype, ("auto",)),
        ):
            if value not in known:
                raise StartError(
                    f"{flag} {value}: --device interpreter computes in float32; choose "
                    f"{' or '.join(known)}"
                )
    return place


def _named(device: str, *, is_toy: bool) -> Place:
    if is_toy:
        if device not in ("auto", "cpu"):
            raise StartError(f"--device {device}: the toy computes on the CPU; leave it out")
        return Place.CPU
    if device == "auto":
        return Place.GPU if torch.cuda.is_available() else Place.CPU
    return Place(device)
