"""What a section of the check is given, and what it tells: one JSON object a line."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import torch
from triton.runtime.errors import OutOfResources

from kernels.triton_gpu.backend import Gpu

_LOST: Final = ("CUDA error", "illegal memory access", "misaligned address", "launch failure")
"""What is said by errors after which a GPU's context is of no more use."""


class GpuLost(Exception):
    """The GPU's context is broken: nothing more can be run on it in this process."""


@dataclass
class Section:
    """One section at work.

    Attributes:
        is_dry: tiny shapes, in Triton's interpreter, on `device` cpu.
        deadline: on time.monotonic; what would begin later is left out.
        ceilings: what the section of this name measured, by row; empty if it did not.
    """

    device: torch.device
    gpu: Gpu
    is_dry: bool
    deadline: float
    ceilings: dict[str, float] = field(default_factory=dict)
    out: TextIO = sys.stdout

    def row(self, what: str, value: float, unit: str, note: str = "", **details: Any) -> None:
        """One line of the table."""
        self._tell("row", what=what, value=value, unit=unit, note=note, **details)

    def fault(self, what: str, why: str) -> None:
        """Something is wrong: the check will fail."""
        self._tell("fault", what=what, why=why)

    def left_out(self, what: str, why: str) -> None:
        """Something was not done."""
        self._tell("left_out", what=what, why=why)

    def target(self, what: str, value: float, unit: str, limit: float, *, is_met: bool) -> None:
        """A promise about speed, and what came of it; one missed is no fault. Nothing if dry."""
        if not self.is_dry:
            self._tell("target", what=what, value=value, unit=unit, limit=limit, is_met=is_met)

    def has_time(self, what: str) -> bool:
        """Whether there is time left; if not, `what` is told to be left out."""
        if time.monotonic() < self.deadline:
            return True
        self.left_out(what, "no time left")
        return False

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is a fault of `what` alone. Raises: GpuLost."""
        try:
            yield
        except GpuLost:
            raise
        except Exception as error:
            self.fault(what, f"{type(error).__name__}: {str(error)[-600:]}")
            if any(sign in str(error) for sign in _LOST):
                raise GpuLost(what) from error

    @contextmanager
    def tried(self, what: str) -> Iterator[None]:
        """As `guarded`, for what need not work: that a GPU has no room for it is told, no more."""
        with self.guarded(what):
            try:
                yield
            except OutOfResources as error:
                self.left_out(what, f"no room: {error.name}, {error.required} of {error.limit}")

    def of_ceiling(self, value: float, ceiling: str) -> str:
        """`value` as a share of what the ceilings' section measured, in words; nothing if dry."""
        if self.is_dry:
            return ""
        most = self.ceilings.get(ceiling)
        return f"{100 * value / most:.0f} % of {ceiling}" if most else f"{ceiling}: not measured"

    def _tell(self, kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), file=self.out, flush=True)
