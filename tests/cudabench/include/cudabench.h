// What a kernel's source sees when g++ compiles it for the CPU: CUDA's keywords, built-in variables and functions.
// Light on purpose (no C++ library): it is compiled again for every variant of every kernel. The scheduler, the warp
// operations and the checks are in runtime/, compiled once per mode and linked to each kernel.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS // the C math.h: libstdc++'s takes longer to compile than most kernels
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define CUDABENCH 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#ifdef __SANITIZE_ADDRESS__ // AddressSanitizer puts no red zones around variables of a named section
#define __shared__ static
#else // one section, so that the launcher can fill it with NaN and the checks can recognise it
#define __shared__ static __attribute__((section("cudabench_shared")))
#endif

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
#define CUDABENCH_VECTORS(T, N)                                                                                        \
    struct alignas(sizeof(T)) N##1 { T x; };                                                                           \
    struct alignas(sizeof(T) * 2) N##2 { T x, y; };                                                                    \
    struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) N##4 { T x, y, z, w; };                                    \
    static inline N##1 make_##N##1(T x) { return {x}; }                                                                \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                                        \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDABENCH_VECTORS(float, float)
CUDABENCH_VECTORS(double, double)
CUDABENCH_VECTORS(int, int)
CUDABENCH_VECTORS(unsigned, uint)
CUDABENCH_VECTORS(short, short)
CUDABENCH_VECTORS(unsigned short, ushort)
CUDABENCH_VECTORS(signed char, char)
CUDABENCH_VECTORS(unsigned char, uchar)
CUDABENCH_VECTORS(long long, longlong)
CUDABENCH_VECTORS(unsigned long long, ulonglong)
struct float3 {
    float x, y, z;
};
struct int3 {
    int x, y, z;
};
static inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
static inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
constexpr int warpSize = 32;

#pragma GCC visibility push(hidden) // all that follows is found within this library: no detour over its symbol table
namespace cudabench {

// The part of a fiber (one CUDA thread) that kernels read without a call.
struct Thread {
    uint3 index;
    int id; // x + y * dim.x + z * dim.x * dim.y
};
extern Thread *current;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

[[noreturn]] void fault(const char *where, const char *what);
void barrier(const char *where);
int barrier_vote(const char *where, int operation, int value); // 0 count, 1 and, 2 or
void warp_barrier(const char *where, unsigned mask = ~0u);
uint64_t shuffle(const char *where, unsigned mask, uint64_t value, int source, int bytes);
unsigned ballot(const char *where, unsigned mask, int predicate);
unsigned reduce(const char *where, unsigned mask, unsigned value, int operation); // 0 add, 1 min, 2 max, 3 and 4 or 5 xor; + 8: signed
unsigned match_any(const char *where, unsigned mask, uint64_t value);
void mma(const char *where, float *d, const unsigned *a, const unsigned *b, const float *c, int k, bool bfloat16);
void ldmatrix(const char *where, unsigned *d, const void *row, int count, bool transposed);
void async_copy(const char *where, void *shared, const void *global, int bytes, int source_bytes);
void async_commit();
void async_wait(int groups);
void *dynamic_shared();
unsigned shared_address(const char *where, const void *pointer); // 32-bit, as __cvta_generic_to_shared gives
void *shared_pointer(const char *where, unsigned address);
void atomic_access(const void *pointer, int bytes); // bounds and alignment of an atomic, which cannot race

template <class T> T shuffle_value(const char *where, unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = shuffle(where, mask, bits, source, sizeof(T));
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T> uint64_t bits_of(T value) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
// Source lanes of the four shuffles with a width; a lane whose source lies outside its segment reads itself.
inline int lane() { return current->id & 31; }
inline int xor_lane(int mask, int width = 32) {
    int source = lane() ^ mask;
    return (source & -width) > (lane() & -width) ? lane() : source;
}
inline int down_lane(int delta, int width = 32) { return (lane() & (width - 1)) + delta >= width ? lane() : lane() + delta; }
inline int up_lane(int delta, int width = 32) { return (lane() & (width - 1)) < delta ? lane() : lane() - delta; }
inline int index_lane(int index, int width = 32) { return (lane() & -width) | (index & (width - 1)); }

} // namespace cudabench

#define CUDABENCH_TEXT2(x) #x
#define CUDABENCH_TEXT(x) CUDABENCH_TEXT2(x)
#define CUDABENCH_HERE __FILE__ ":" CUDABENCH_TEXT(__LINE__)

#define threadIdx (cudabench::current->index)
#define blockIdx (cudabench::block_index)
#define blockDim (cudabench::block_dim)
#define gridDim (cudabench::grid_dim)
#define __syncthreads() cudabench::barrier(CUDABENCH_HERE)
#define __syncthreads_count(p) cudabench::barrier_vote(CUDABENCH_HERE, 0, (p))
#define __syncthreads_and(p) cudabench::barrier_vote(CUDABENCH_HERE, 1, (p))
#define __syncthreads_or(p) cudabench::barrier_vote(CUDABENCH_HERE, 2, (p))
#define __syncwarp(...) cudabench::warp_barrier(CUDABENCH_HERE, ##__VA_ARGS__)
#define __shfl_sync(m, v, i, ...)                                                                                      \
    cudabench::shuffle_value(CUDABENCH_HERE, m, v, cudabench::index_lane(i, ##__VA_ARGS__))
#define __shfl_xor_sync(m, v, i, ...)                                                                                  \
    cudabench::shuffle_value(CUDABENCH_HERE, m, v, cudabench::xor_lane(i, ##__VA_ARGS__))
#define __shfl_down_sync(m, v, i, ...)                                                                                 \
    cudabench::shuffle_value(CUDABENCH_HERE, m, v, cudabench::down_lane(i, ##__VA_ARGS__))
#define __shfl_up_sync(m, v, i, ...)                                                                                   \
    cudabench::shuffle_value(CUDABENCH_HERE, m, v, cudabench::up_lane(i, ##__VA_ARGS__))
#define __ballot_sync(m, p) cudabench::ballot(CUDABENCH_HERE, m, (p) ? 1 : 0)
#define __any_sync(m, p) (cudabench::ballot(CUDABENCH_HERE, m, (p) ? 1 : 0) != 0)
#define __all_sync(m, p) (cudabench::ballot(CUDABENCH_HERE, m, (p) ? 0 : 1) == 0)
#define __match_any_sync(m, v) cudabench::match_any(CUDABENCH_HERE, m, cudabench::bits_of(v))
#define __reduce_add_sync(m, v) ((decltype(v))cudabench::reduce(CUDABENCH_HERE, m, v, 0))
#define __reduce_min_sync(m, v) ((decltype(v))cudabench::reduce(CUDABENCH_HERE, m, v, ((decltype(v))-1 < 0 ? 8 : 0) + 1))
#define __reduce_max_sync(m, v) ((decltype(v))cudabench::reduce(CUDABENCH_HERE, m, v, ((decltype(v))-1 < 0 ? 8 : 0) + 2))
#define __reduce_and_sync(m, v) cudabench::reduce(CUDABENCH_HERE, m, v, 3)
#define __reduce_or_sync(m, v) cudabench::reduce(CUDABENCH_HERE, m, v, 4)
#define __reduce_xor_sync(m, v) cudabench::reduce(CUDABENCH_HERE, m, v, 5)
#define __cvta_generic_to_shared(p) ((size_t)cudabench::shared_address(CUDABENCH_HERE, p))

#include "cudabench_math.h"
#include "cudabench_ptx.h"
#include "cudabench_launch.h"
#pragma GCC visibility pop
