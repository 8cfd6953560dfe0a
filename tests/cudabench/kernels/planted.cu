// Small kernels, each with a fault that -D plants. Without it they are right. See tests/kernels/cuda/test_bench_faults.py.
#include <cuda_fp16.h>
#include "planted.cuh"

// y[i] = sum over tiles of 64 of x[tile][63 - i]: a tile in shared memory, used again for the next.
extern "C" __global__ void __launch_bounds__(64) tiles(const float *__restrict__ x, float *y, int n) {
    __shared__ float tile[64];
    float sum = 0.f;
    for (int start = 0; start < n; start += 64) {
        tile[threadIdx.x] = x[start + threadIdx.x];
#ifndef NO_BARRIER_BEFORE_READ
        __syncthreads();
#endif
        sum += tile[63 - threadIdx.x];
#ifndef NO_BARRIER_BEFORE_WRITE
        __syncthreads();
#endif
    }
    y[threadIdx.x] = sum;
}

// y[i] = i ^ 1, through shared memory, by one warp.
extern "C" __global__ void neighbours(float *y) {
    __shared__ float t[32];
    t[threadIdx.x] = threadIdx.x;
#ifndef NO_WARP_SYNC
    __syncwarp();
#endif
    y[threadIdx.x] = t[threadIdx.x ^ 1];
}

// y[tile][i] = x[tile][63 - i], double buffered by cp.async, 16 bytes a thread.
extern "C" __global__ void __launch_bounds__(16) pipeline(const float *__restrict__ x, float *y, int tiles) {
    __shared__ __align__(16) float stage[2][64];
    auto load = [&](int tile) {
        copy_async(&stage[tile & 1][threadIdx.x * 4], x + tile * 64 + threadIdx.x * 4);
        commit_async();
    };
    load(0);
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) load(tile + 1);
#ifndef NO_ASYNC_WAIT
        if (tile + 1 < tiles)
            wait_async<1>();
        else
            wait_async<0>();
#endif
        __syncthreads();
        for (int i = threadIdx.x; i < 64; i += blockDim.x) y[tile * 64 + i] = stage[tile & 1][63 - i];
        __syncthreads();
    }
}

// cache[slots[t]][0..15] = x[t][0..15] as float16, one block a token; a negative slot is padding.
extern "C" __global__ void write_slots(const float *__restrict__ x, __half *cache, const long long *__restrict__ slots) {
    const long long slot = slots[blockIdx.x];
#ifndef NO_PADDING
    if (slot < 0) return;
#endif
    cache[slot * 16 + threadIdx.x] = __float2half(x[blockIdx.x * 16 + threadIdx.x]);
}

// y[i] = sum of the 8 values at x + 8 i, loaded by 16 bytes; `first` shifts the start.
extern "C" __global__ void vectors(const __half *__restrict__ x, float *y, int first) {
    const uint4 v = *reinterpret_cast<const uint4 *>(x + first + threadIdx.x * 8);
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    float sum = 0.f;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) sum += __half2float(__ushort_as_half((unsigned short)(words[i] >> (16 * j))));
    y[threadIdx.x] = sum;
}

// y[i] = element i of block `block` of a cache [block][BLOCK_ELEMENTS].
extern "C" __global__ void read_block(const __half *__restrict__ cache, float *y, int block) {
#ifdef OFFSET_IN_INT32
    const int offset = block * BLOCK_ELEMENTS + threadIdx.x;
#else
    const long long offset = (long long)block * BLOCK_ELEMENTS + threadIdx.x;
#endif
    y[threadIdx.x] = __half2float(cache[offset]);
}

// c [16][8] = a [16][16] @ b [16][8], one warp, row major, through ldmatrix and mma.
extern "C" __global__ void product(const __half *__restrict__ a, const __half *__restrict__ b, float *c) {
    __shared__ __align__(16) __half sa[16][24], sb[16][8];
    for (int i = threadIdx.x; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) sb[i / 8][i % 8] = b[i];
    __syncwarp();
    unsigned fa[4], fb[2];
    load_a(fa, &sa[threadIdx.x & 15][(threadIdx.x >> 4) * 8]);
    load_b(fb, &sb[threadIdx.x & 15][0]);
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, fa, fb);
    for (int i = 0; i < 4; i++) c[((threadIdx.x >> 2) + (i >> 1) * 8) * 8 + (threadIdx.x & 3) * 2 + (i & 1)] = d[i];
}

// y[i] = i, through shared memory, `shift` places further than it should be.
extern "C" __global__ void beyond(float *y, int shift, int use_dynamic) {
    __shared__ float fixed[64];
    extern __shared__ float dynamic[];
    float *t = use_dynamic ? dynamic : fixed;
    t[threadIdx.x + shift] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = t[threadIdx.x + shift];
}

// y[0] = 2^31 - 1 + increment, in an int.
extern "C" __global__ void overflow(int *y, int increment) { y[0] = 2147483647 + increment; }

// Every block reads x[0]; block `writer` writes it as well.
extern "C" __global__ void read_and_write(float *x, float *y, int writer) {
    const float value = x[0];
    y[blockIdx.x] = value;
    if ((int)blockIdx.x == writer) x[0] = value + 1.f;
}

// What CUDA forbids or never ends, by number; 32 threads.
extern "C" __global__ void misuse(float *y, int number) {
    float value = threadIdx.x;
    if (number == 1) { // two barriers, half the warp at each
        if (threadIdx.x < 16) __syncthreads();
        else __syncthreads();
    } else if (number == 2) { // half the warp has returned
        if (threadIdx.x >= 16) return;
        value = __shfl_xor_sync(0xffffffffu, value, 1);
    } else if (number == 3) { // a mask that lacks the caller
        value = __shfl_xor_sync(0x0000ffffu, value, 1);
    } else if (number == 4) { // a source that the mask lacks
        if (threadIdx.x < 16) value = __shfl_xor_sync(0x0000ffffu, value, 16);
    } else if (number == 5) { // one half waits at a barrier, the other for all lanes
        if (threadIdx.x < 16) __syncthreads();
        else value = __shfl_xor_sync(0xffffffffu, value, 1);
    } else if (number == 6) {
        for (;;) __syncthreads();
    }
    y[threadIdx.x] = value;
}
