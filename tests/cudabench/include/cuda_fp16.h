// float16 as cuda_fp16.h has it: a storage type; arithmetic rounds once per operation, to nearest even.
#pragma once
#include "cudabench.h"
namespace cudabench {
// _Float16 is one instruction either way where the processor has F16C, and a library call elsewhere
inline float half_to_float(uint16_t h) { return (float)cudabench_bits<_Float16>(h); }
inline uint16_t float_to_half(float f) { return cudabench_bits<uint16_t>((_Float16)f); }
} // namespace cudabench
struct __half {
    uint16_t bits;
    __half() = default;
    explicit __half(float f) : bits(cudabench::float_to_half(f)) {}
    explicit __half(double f) : bits(cudabench::float_to_half((float)f)) {}
    explicit __half(int f) : bits(cudabench::float_to_half((float)f)) {}
    operator float() const { return cudabench::half_to_float(bits); }
};
struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;
#define CUDABENCH_T __half
#define CUDABENCH_T2 __half2
#include "cudabench_narrow.h"
#undef CUDABENCH_T
#undef CUDABENCH_T2
static inline float __half2float(__half h) { return (float)h; }
static inline __half __float2half(float f) { return __half(f); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline __half __ushort_as_half(unsigned short u) { return cudabench_bits<__half>(u); }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
static inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __half2 __float2half2_rn(float a) { return {__half(a), __half(a)}; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half2 __half2half2(__half a) { return {a, a}; }
static inline __half __low2half(__half2 a) { return a.x; }
static inline __half __high2half(__half2 a) { return a.y; }
static inline float __low2float(__half2 a) { return (float)a.x; }
static inline float __high2float(__half2 a) { return (float)a.y; }
