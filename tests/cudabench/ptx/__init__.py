"""An interpreter of PTX, on NumPy arrays: what NVRTC made of a kernel is executed, inline asm included."""

from cudabench.ptx.kernel import PtxKernel, interpret
from cudabench.ptx.schedule import Schedule

__all__ = ["PtxKernel", "Schedule", "interpret"]
