// bfloat16 as cuda_bf16.h has it: a storage type; arithmetic rounds once per operation, to nearest even.
#pragma once
#include "cudabench.h"
namespace cudabench {
inline float bfloat16_to_float(uint16_t b) { return cudabench_bits<float>((uint32_t)b << 16); }
inline uint16_t float_to_bfloat16(float f) {
    const uint32_t u = cudabench_bits<uint32_t>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff; // the one NaN that CUDA's conversion gives
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
} // namespace cudabench
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) : bits(cudabench::float_to_bfloat16(f)) {}
    explicit __nv_bfloat16(double f) : bits(cudabench::float_to_bfloat16((float)f)) {}
    explicit __nv_bfloat16(int f) : bits(cudabench::float_to_bfloat16((float)f)) {}
    operator float() const { return cudabench::bfloat16_to_float(bits); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
#define CUDABENCH_T __nv_bfloat16
#define CUDABENCH_T2 __nv_bfloat162
#include "cudabench_narrow.h"
#undef CUDABENCH_T
#undef CUDABENCH_T2
static inline float __bfloat162float(__nv_bfloat16 h) { return (float)h; }
static inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return cudabench_bits<__nv_bfloat16>(u); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
static inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {(float)h.x, (float)h.y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {__nv_bfloat16(f.x), __nv_bfloat16(f.y)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float a) { return {__nv_bfloat16(a), __nv_bfloat16(a)}; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
static inline float __low2float(__nv_bfloat162 a) { return (float)a.x; }
static inline float __high2float(__nv_bfloat162 a) { return (float)a.y; }
