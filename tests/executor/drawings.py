"""All that draws tokens and can run here: NumPy, and C++ for this CPU and for a lesser one."""

from typing import Final

from kernels.cpu.native.drawing import NativeDraws
from services.executor.native_drawing import NativeDrawing
from services.executor.numpy_drawing import NumpyDrawing
from tests.kernels.backends import NATIVE, lesser_library

MAKERS: Final = {
    "numpy": NumpyDrawing,
    "native": lambda: NativeDrawing(NativeDraws()),
    "native AVX2": lambda: NativeDrawing(NativeDraws(lesser_library())),
}
DRAWINGS: Final = ["numpy", *NATIVE]
"""Names of MAKERS."""
