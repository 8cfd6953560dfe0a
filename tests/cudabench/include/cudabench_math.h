// CUDA's arithmetic, conversion, bit and atomic functions for the CPU.
// Approximate functions (__expf, rsqrtf, ...) are computed exactly here: what a GPU makes of them no CPU can show.
#pragma once

#define __expf expf // glibc has functions of these names, hence macros
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __powf powf
#define __exp2f exp2f
#define __tanhf tanhf
#define __fdividef(a, b) ((float)(a) / (float)(b))
#define __frcp_rn(a) (1.f / (float)(a))
#define __fsqrt_rn sqrtf
#define __fmaf_rn fmaf
#define __fma_rn fma
#define __saturatef(a) fminf(fmaxf((a), 0.f), 1.f)
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
#ifndef CUDABENCH_RUNTIME // which includes C++ headers that have these
static inline float abs(float x) { return fabsf(x); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
#endif

#define CUDABENCH_MINMAX(T)                                                                                            \
    static inline T min(T a, T b) { return b < a ? b : a; }                                                            \
    static inline T max(T a, T b) { return a < b ? b : a; }
CUDABENCH_MINMAX(int)
CUDABENCH_MINMAX(unsigned)
CUDABENCH_MINMAX(long)
CUDABENCH_MINMAX(unsigned long)
CUDABENCH_MINMAX(long long)
CUDABENCH_MINMAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

template <class To, class From> static inline To cudabench_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To out;
    __builtin_memcpy(&out, &value, sizeof out);
    return out;
}
static inline int __float_as_int(float x) { return cudabench_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return cudabench_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return cudabench_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return cudabench_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return cudabench_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return cudabench_bits<double>(x); }

// Conversions to integers saturate and make NaN 0, as on the GPU (PTX ISA, cvt).
static inline int cudabench_to_int(float x) {
    return x != x ? 0 : x >= 2147483648.f ? 2147483647 : x <= -2147483648.f ? (-2147483647 - 1) : (int)x;
}
static inline unsigned cudabench_to_uint(float x) {
    return !(x > 0.f) ? 0 : x >= 4294967296.f ? 4294967295u : (unsigned)x;
}
static inline int __float2int_rn(float x) { return cudabench_to_int(rintf(x)); }
static inline int __float2int_rz(float x) { return cudabench_to_int(truncf(x)); }
static inline int __float2int_rd(float x) { return cudabench_to_int(floorf(x)); }
static inline int __float2int_ru(float x) { return cudabench_to_int(ceilf(x)); }
static inline unsigned __float2uint_rn(float x) { return cudabench_to_uint(rintf(x)); }
static inline unsigned __float2uint_rz(float x) { return cudabench_to_uint(truncf(x)); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= (x >> i & 1) << (31 - i);
    return out;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32) | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((((uint64_t)high << 32) | low) << (shift & 31)) >> 32);
}
static inline unsigned cudabench_prmt(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = ((uint64_t)y << 32) | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> (4 * i);
        unsigned byte = (unsigned)(bytes >> (8 * (nibble & 7))) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0; // the byte's sign, replicated
        out |= byte << (8 * i);
    }
    return out;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) { // three bits of each nibble count
    return cudabench_prmt(x, y, selector & 0x7777);
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += ((a >> (8 * i)) & 255) * ((b >> (8 * i)) & 255);
    return c;
}

template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldca(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }

// One operating-system thread runs everything, so plain code is atomic. It is kept from the race checks by
// no_sanitize, and its bounds and alignment are checked by atomic_access.
#define CUDABENCH_ATOMIC(name, value)                                                                                  \
    template <class T> __attribute__((noinline, no_sanitize("thread"))) T name(T *p, T v) {                            \
        cudabench::atomic_access(p, sizeof(T));                                                                        \
        const T old = *p;                                                                                              \
        *p = (value);                                                                                                  \
        return old;                                                                                                    \
    }
CUDABENCH_ATOMIC(atomicAdd, old + v)
CUDABENCH_ATOMIC(atomicSub, old - v)
CUDABENCH_ATOMIC(atomicExch, v)
CUDABENCH_ATOMIC(atomicMin, v < old ? v : old)
CUDABENCH_ATOMIC(atomicMax, old < v ? v : old)
CUDABENCH_ATOMIC(atomicAnd, old & v)
CUDABENCH_ATOMIC(atomicOr, old | v)
CUDABENCH_ATOMIC(atomicXor, old ^ v)
template <class T> __attribute__((noinline, no_sanitize("thread"))) T atomicCAS(T *p, T compare, T v) {
    cudabench::atomic_access(p, sizeof(T));
    const T old = *p;
    if (old == compare) *p = v;
    return old;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) {}
