"""A test bench for CUDA C on a machine without a GPU. docs/cuda-bench.md says what it can and cannot show.

`emulate` runs a kernel compiled by g++, `cudabench.ptx.interpret` the PTX that NVRTC made of it, with the same
arguments; `cudabench.nvrtc.compile_cuda` tells what it takes, and `python -m cudabench resources` tabulates that.

Run a kernel on the CPU (g++; one fiber per CUDA thread, real barriers, real warp operations)::

    from cudabench import emulate, Undefined, KernelFault, BenchError

    kernel = emulate("kernels/cuda/scale.cu", defines={"HEAD_DIM": 128, "KV_BF16": ""})   # or emulate(path, "name")
    out = np.full(1000, np.nan, np.float32)
    kernel((8,), (128,), (x, out, np.int64(1000), np.float32(2)), shared_mem=0, order="forward")

* arguments: arrays for pointers (views too), NumPy scalars of the parameter's type and size for the rest (checked),
  np.uint64(0) for a null pointer. Arrays are changed in place. `kernel.signature` lists the C types.
* order="forward" | "reverse" | "random:SEED": the order of threads and blocks, and of when a cp.async lands (as late
  as its wait allows, at once, either). Run all three. Shared memory starts as NaN (all bits set).
* check=None: fast. check="race": races (within and between blocks), reads of shared memory or of `Undefined(array)`
  before they are written, cp.async not waited for, bounds and alignment of every access, with file and line.
  check="asan": AddressSanitizer and UBSan (int32 overflow, shifts), in a child process. check="traffic": returns a
  TrafficReport: sectors and bank conflicts per line, bytes of cp.async under way.
* KernelFault is the kernel's fault, BenchError the caller's or a construct the bench does not know.

Sources are taken as they are: extern "C" kernels; `#include "x.cuh"` and <cuda_fp16.h>, <cuda_bf16.h>; static and
`extern __shared__` arrays; shuffles, votes, reductions with any mask; atomics; and inline PTX, which is parsed and
executed: mma.m16n8k16 and m16n8k8 (f16, bf16; f32 sums), ldmatrix x1, x2, x4 [.trans], cp.async [.ca .cg] with
commit_group, wait_group, wait_all, and the few others of include/cudabench_ptx.h. So no kernel needs a branch for the
CPU; `#ifdef CUDABENCH` exists for a test that wants one. Sums are fused only where the source says fmaf.
"""

from cudabench.emulator import Kernel, Undefined, emulate
from cudabench.errors import BenchError, BenchMissing, KernelFault
from cudabench.traffic import LineTraffic, TrafficReport

__all__ = [
    "BenchError",
    "BenchMissing",
    "Kernel",
    "KernelFault",
    "LineTraffic",
    "TrafficReport",
    "Undefined",
    "emulate",
]
