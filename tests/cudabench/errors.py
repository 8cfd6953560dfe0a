"""What the bench raises."""


class BenchError(Exception):
    """The source cannot be built or launched as asked; the message says where and why."""


class KernelFault(Exception):
    """A kernel did what CUDA forbids; the message names the source line, block and thread."""


class BenchMissing(Exception):
    """A tool that an instrument needs (g++, NVRTC) is not on this machine."""
