"""A pretended CUDA runtime for tests: everything queued runs late, in an order that is random by a seed.

::

    from streamdouble import StreamDouble

    device = CudaDevice(StreamDouble(seed))          # cupaged.device.cuda
    device = CudaDevice(StreamDouble(seed, kernels="emulated"))

Launches, copies, records, waits and graphs are queued as they would be on a GPU and hold addresses, nothing else. Who
runs next is drawn among the heads of streams whose events are reached: a little at every call of the host, what is
needed when it waits. A device array that is dropped is NaN from there on, in the order of the compute stream, and is
handed out again; pinned memory that is dropped is NaN at once. So a missing wait, a buffer reused too early and an
array that nobody kept alive show as wrong numbers under some seed. docs/cuda-bench.md says more.
"""

from streamdouble.double import StreamDouble
from streamdouble.work import BIASES

__all__ = ["BIASES", "StreamDouble"]
