// Tensor-core instructions in small wrappers; from sm_80 on. Fragment layouts: PTX ISA, "Matrix Fragments for
// mma.m16n8k16". With g = lane / 4 and t = lane % 4 a lane holds
//
//   A (16 x 16)  a[0]: row g, columns 2t, 2t+1    a[1]: row g+8    a[2], a[3]: the same, columns + 8
//   B (16 x 8)   b[0]: rows 2t, 2t+1, column g    b[1]: rows + 8
//   C (16 x 8)   c[0], c[1]: row g, columns 2t, 2t+1    c[2], c[3]: row g+8
#pragma once
#include "common.cuh"

// c += A . B, products exact, sums in float32.
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if STORAGE == 2
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8x8 matrices of 2-byte elements; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes aligned.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

// Two floats as a pair of the storage type, the first in the lower half; and what that leaves of them.
__device__ __forceinline__ unsigned pack_pair(float x, float y, float &x_left, float &y_left) {
#if STORAGE == 2
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
#else
    const __half2 pair = __floats2half2_rn(x, y);
#endif
    const unsigned bits = *reinterpret_cast<const unsigned *>(&pair);
    const float2 kept = unpack2(bits, stored_t());
    x_left = x - kept.x;
    y_left = y - kept.y;
    return bits;
}

// Infinities and NaN of a pair as zeros.
__device__ __forceinline__ unsigned finite_pair(unsigned bits) {
    const unsigned exponent = STORAGE == 2 ? 0x7f80u : 0x7c00u;
    const unsigned low = (bits & exponent) == exponent ? 0u : 0xffffu;
    const unsigned high = (bits >> 16 & exponent) == exponent ? 0u : 0xffff0000u;
    return bits & (low | high);
}
