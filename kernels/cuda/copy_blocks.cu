// Copies whole blocks, all layers, bit for bit.
//
// Grid: (pairs, layers, slices of a block's layer), 256 threads of 16 bytes (or of 1, where an odd head_dim leaves blocks
// unaligned). Bytes: each read once and written once. Roof: memory bandwidth.
#include "common.cuh"

#ifndef UNIT_BYTES
#define UNIT_BYTES 16
#endif
#if UNIT_BYTES == 16
typedef uint4 unit_t;
#else
typedef unsigned char unit_t;
#endif

// Frame pairs[2 * i] to frame pairs[2 * i + 1]; strides and sizes in units. The pairs have no order among themselves:
// the caller has made sure that no destination is named twice or is a source.
extern "C" __global__ void __launch_bounds__(256)
copy_blocks(unit_t *pool, const long long *__restrict__ pairs, long long block_stride, long long layer_stride,
            long long units) {
    const long long layer = blockIdx.y * layer_stride;
    const unit_t *source = pool + pairs[2 * blockIdx.x] * block_stride + layer;
    unit_t *target = pool + pairs[2 * blockIdx.x + 1] * block_stride + layer;
    for (long long i = blockIdx.z * blockDim.x + threadIdx.x; i < units; i += gridDim.z * blockDim.x)
        target[i] = source[i];
}
