"""All that draws tokens and can run here: NumPy, and C++ for this CPU and for a lesser one."""

from typing import Final

from kernels.cpu.native.drawing import NativeDraws
from services.executor.native_drawing import NativeDrawing
from services.executor.numpy_drawing import NumpyDrawing
from tests.kernels.backends import LESSER_FLAGS, NATIVE, library_with

MAKERS: Final = {
    "numpy": NumpyDrawing,
    "native": lambda: NativeDrawing(NativeDraws()),
    "native AVX2": lambda: NativeDrawing(NativeDraws(library_with(LESSER_FLAGS))),
}
DRAWINGS: Final = [name for name in MAKERS if name == "numpy" or name in NATIVE]
"""Names of those of MAKERS that can run here. Matrix registers are nothing to draws."""
