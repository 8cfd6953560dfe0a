// One of each function of CUDA that the bench stands in for; the emulator and the interpreted PTX must agree.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// out [17][n] from pairs of ints.
extern "C" __global__ void integers(const int *__restrict__ a, const int *__restrict__ b, int *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int x = a[i], y = b[i];
    const unsigned u = (unsigned)x, v = (unsigned)y;
    int k = 0;
    auto put = [&](int value) { out[k++ * n + i] = value; };
    put(y ? x / y : 0);
    put(y ? x % y : 0);
    put((int)(v ? u / v : 0));
    put(__mulhi(x, y));
    put((int)__umulhi(u, v));
    put((int)(((long long)x * y) >> 7));
    put(x >> (y & 31));
    put((int)(u >> (v & 31)));
    put((int)__funnelshift_r(u, v, 11));
    put((int)__byte_perm(u, v, 0x52f6));
    put(__popc(u) * 10000 + __clz(x) * 100 + __ffs(x));
    put((int)__brev(u));
    put(__dp4a(x, y, 7));
    put(min(x, y) ^ max(x, y));
    put(abs(x / 2));
    put((int)((u & 0xff00u) | (v ^ ~u)));
    put((int)__umul64hi((unsigned long long)u << 20, (unsigned long long)v << 17));
}

// out [12][n] from pairs of floats; all exact or rounded once, so that bits must agree.
extern "C" __global__ void floats(const float *__restrict__ a, const float *__restrict__ b, float *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = a[i], y = b[i];
    int k = 0;
    auto put = [&](float value) { out[k++ * n + i] = value; };
    put(fmaf(x, y, 0.3f));
    put(__fadd_rn(x, y));
    put(__fdiv_rn(x, y));
    put(fminf(x, y));
    put(fmaxf(x, y));
    put((float)__float2int_rn(x));
    put((float)__float2int_rz(y));
    put(__half2float(__float2half_rn(x)));
    put(__bfloat162float(__float2bfloat16_rn(y)));
    put(sqrtf(fabsf(x)));
    put(x < y ? floorf(x) : ceilf(y));
    put(__low2float(__hadd2(__floats2half2_rn(x, y), __floats2half2_rn(y, x))));
}

// out [14][threads]: what lanes tell each other. One block of whole warps.
extern "C" __global__ void lanes(const int *__restrict__ a, int *out, int *counter) {
    const int i = threadIdx.x, lane = i & 31, n = blockDim.x;
    const int x = a[i];
    int k = 0;
    auto put = [&](int value) { out[k++ * n + i] = value; };
    put(__shfl_sync(0xffffffffu, x, 5));
    put(__shfl_sync(0xffffffffu, x, lane * 3, 8));
    put(__shfl_xor_sync(0xffffffffu, x, 12));
    put(__shfl_xor_sync(0xffffffffu, x, 4, 8));
    put(__shfl_down_sync(0xffffffffu, x, 3));
    put(__shfl_down_sync(0xffffffffu, x, 3, 16));
    put(__shfl_up_sync(0xffffffffu, x, 7));
    put((int)__ballot_sync(0xffffffffu, x & 1));
    put(__any_sync(0xffffffffu, x == 3) + 2 * __all_sync(0xffffffffu, x < 1000));
    put(__syncthreads_count(x & 2));
    put(__syncthreads_or(x == 9) + 2 * __syncthreads_and(x != 77));
    if (lane < 16) { // half a warp under its own mask
        put(__shfl_xor_sync(0xffffu, x, 8));
    } else {
        put(-1);
    }
    atomicAdd(counter, x);
    __syncwarp();
    put((int)__reduce_add_sync(0xffffffffu, (unsigned)x));
    put((int)__match_any_sync(0xffffffffu, x & 3));
}
