// Weights as stored, widened a unit at a time: what matmul, embed and dequantise read.
//
// A row is cut into units, of which a lane takes one at a time with one 16-byte load, so that a warp reads consecutive
// bytes. -DFORMAT chooses; packing.py makes the planes, in the order of GGUF's blocks of 32 or 256 values:
//
//   F32 4, F16 8, BF16 8 values a unit: the values themselves
//   Q8_0 16 values: int8 q; scales: a float16 d for two units           d * q
//   the rest 32 values a unit
//   Q4_0 32 values: low halves of 16 bytes, then high ones; float16 d   d * (q - 8)
//   Q4_1 the same; float16 d, m                                         d * q + m
//   Q4_K the same; a 16-byte head a superblock of 256: d, m, 6-bit s, t d * s * q - m * t
//   Q6_K low 4 bits as Q4_0, upper 2 in 8 bytes of `high` (byte j: q[j], q[j+8], q[j+16], q[j+24]); int8 s for 16
//        values in `scales`, float16 d a superblock in `deltas`          d * s * (q - 32)
//
// Products and sums are rounded one by one, as ggml-quants.c does: every value has the bits of the file's own
// dequantisation.
#pragma once
#include "common.cuh"

#define F32 0
#define F16 1
#define BF16 2
#define Q8_0 3
#define Q4_0 4
#define Q4_1 5
#define Q4_K 6
#define Q6_K 7
#ifndef FORMAT
#define FORMAT Q4_0
#endif
#define UNIT (FORMAT == F32 ? 4 : FORMAT <= BF16 ? 8 : FORMAT == Q8_0 ? 16 : 32)

struct Weights {
    const unsigned char *quants, *high, *scales, *deltas;
    long long units; // of a row
};

__device__ __forceinline__ float half_at(const unsigned char *at) { return to_float(*reinterpret_cast<const __half *>(at)); }

// The values of one unit of a row.
__device__ __forceinline__ void load_unit(const Weights &weights, long long row, int unit, float (&out)[UNIT]) {
    const long long at = row * weights.units + unit;
#if FORMAT == F32
    unpack(reinterpret_cast<const uint4 *>(weights.quants)[at], out, 0.f);
#elif FORMAT == F16
    unpack(reinterpret_cast<const uint4 *>(weights.quants)[at], out, __half());
#elif FORMAT == BF16
    unpack(reinterpret_cast<const uint4 *>(weights.quants)[at], out, __nv_bfloat16());
#elif FORMAT == Q8_0
    const uint4 q = reinterpret_cast<const uint4 *>(weights.quants)[at];
    const unsigned words[4] = {q.x, q.y, q.z, q.w};
    const float d = half_at(weights.scales + (at >> 1) * 2);
#pragma unroll
    for (int i = 0; i < 16; i++) out[i] = (float)(int)(signed char)(words[i / 4] >> (8 * (i % 4))) * d;
#else
    const uint4 q = reinterpret_cast<const uint4 *>(weights.quants)[at];
    const unsigned words[4] = {q.x, q.y, q.z, q.w};
#if FORMAT == Q4_0
    const float d = half_at(weights.scales + 2 * at);
#elif FORMAT == Q4_1
    const float d = half_at(weights.scales + 4 * at), m = half_at(weights.scales + 4 * at + 2);
#elif FORMAT == Q4_K
    // s and t of group g: the low 6 bits of bytes g and 4 + g for g < 4; else the halves of byte 4 + g, with the upper 2
    // bits of bytes g - 4 and g.
    const uint4 head = *reinterpret_cast<const uint4 *>(weights.scales + (at >> 3) * 16);
    const unsigned char *first = weights.scales + (at >> 3) * 16;
    const int g = (int)(at & 7), shift = 8 * (g & 3);
    const unsigned s_byte = head.y >> shift & 255, t_byte = head.z >> shift & 255, rest = head.w >> shift & 255;
    const unsigned s = g < 4 ? s_byte & 63 : (rest & 15) | (s_byte >> 2 & 48);
    const unsigned t = g < 4 ? t_byte & 63 : rest >> 4 | (t_byte >> 2 & 48);
    const float d = half_at(first) * (float)(int)s, m = half_at(first + 2) * (float)(int)t;
#elif FORMAT == Q6_K
    const uint2 two = reinterpret_cast<const uint2 *>(weights.high)[at];
    const float super = half_at(weights.deltas + 2 * (at >> 3));
    const float d0 = super * (float)(int)(signed char)weights.scales[2 * at];
    const float d1 = super * (float)(int)(signed char)weights.scales[2 * at + 1];
#endif
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int value = (int)(words[i % 16 / 4] >> (8 * (i % 4) + (i < 16 ? 0 : 4)) & 15);
#if FORMAT == Q4_0
        out[i] = (float)(value - 8) * d;
#elif FORMAT == Q4_1
        out[i] = (float)value * d + m;
#elif FORMAT == Q4_K
        out[i] = (float)value * d - m;
#elif FORMAT == Q6_K
        const unsigned upper = (i % 8 < 4 ? two.x : two.y) >> (8 * (i % 4) + 2 * (i / 8)) & 3;
        out[i] = (float)(value + (int)(upper << 4) - 32) * (i < 16 ? d0 : d1);
#endif
    }
#endif
}
