"""CUDA C kernels, one `.cu` file each, and the Python that launches them. docs/kernels.md says what each computes.

`operations.CudaOperations` is `interface.Operations` over a `launch.Backend`: CuPy on a GPU
(`library.cuda_operations`), the test bench's emulator on any machine. Nothing imports CuPy before a GPU is asked for.
"""
