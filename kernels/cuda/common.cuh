// What all kernels share: storage types, 16-byte chunks, asynchronous copies, reductions.
//
// Every product-and-sum is an explicit fmaf and kernels are compiled with -fmad=false, so that a value's arithmetic does
// not depend on what the compiler fuses in one variant of a kernel and not in another.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define NEG_INF __int_as_float(0xff800000)
#define FULL_MASK 0xffffffffu
#define LOG2E 1.4426950408889634f

// Block references (cupaged/kernels/interface.py): sign clear, format bit 30, pool bits 28-29, frame bits 0-27.
#define FRAME_MASK 0x0fffffff
#define POOL_SHIFT 28

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Narrowing, to nearest with ties to even; a NaN stays one, what is too large becomes infinite.
__device__ __forceinline__ void narrow(float x, float *out) { *out = x; }
__device__ __forceinline__ void narrow(float x, __half *out) { *out = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16 *out) { *out = __float2bfloat16_rn(x); }

// A storage type is chosen by -DSTORAGE: 0 float32, 1 float16, 2 bfloat16 (uint16 to CuPy).
#ifndef STORAGE
#define STORAGE 1
#endif
#if STORAGE == 0
typedef float stored_t;
#elif STORAGE == 1
typedef __half stored_t;
#else
typedef __nv_bfloat16 stored_t;
#endif
#define CHUNK (16 / (int)sizeof(stored_t)) // elements of a 16-byte chunk, the widest load there is

// Two adjacent elements of one 4-byte word.
__device__ __forceinline__ float2 unpack2(unsigned bits, __half) {
    const __half2 pair = *reinterpret_cast<const __half2 *>(&bits);
    return __half22float2(pair);
}
// bfloat16 is the upper half of a float32: widening is a shift.
__device__ __forceinline__ float2 unpack2(unsigned bits, __nv_bfloat16) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ void unpack(uint4 bits, float (&out)[4], float) {
    out[0] = __uint_as_float(bits.x);
    out[1] = __uint_as_float(bits.y);
    out[2] = __uint_as_float(bits.z);
    out[3] = __uint_as_float(bits.w);
}
template <class T> __device__ __forceinline__ void unpack(uint4 bits, float (&out)[8], T kind) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack2(words[i], kind);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}

// 16 bytes from global to shared memory. From sm_80 on they travel without passing through registers and land at the
// matching wait; before, they are there when the call returns.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define ASYNC_COPIES 1
#else
#define ASYNC_COPIES 0
#endif

// `valid` false: 16 zero bytes are written and nothing is read.
__device__ __forceinline__ void copy16(void *shared, const void *global, bool valid) {
#if ASYNC_COPIES
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *reinterpret_cast<uint4 *>(shared) = valid ? *reinterpret_cast<const uint4 *>(global) : make_uint4(0, 0, 0, 0);
#endif
}

// Closes the group of this thread's copies issued since the last one.
__device__ __forceinline__ void copies_commit() {
#if ASYNC_COPIES
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most N of this thread's groups are on their way. Others' copies need a barrier after it.
template <int N> __device__ __forceinline__ void copies_wait() {
#if ASYNC_COPIES
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// One element of a rotated pair: x * cosine + other * sine, where `other` is minus the second for the first of a pair.
__device__ __forceinline__ float rotated(float x, float other, float cosine, float sine) {
    return fmaf(x, cosine, other * sine);
}

// Sum over a warp, the same bits in every lane: a butterfly, each level a commutative sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(FULL_MASK, x, lanes);
    return x;
}

// Sum over a block of whole warps (at most 32), the same bits in every thread. scratch: 32 floats of shared memory.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads(); // scratch may still be read by an earlier sum
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < (int)blockDim.x >> 5; i++) total += scratch[i];
    return total;
}
