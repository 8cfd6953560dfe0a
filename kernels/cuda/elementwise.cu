// Rotation of heads, gated activations, sums and gathered rows: a thread an element, bytes alone.
//
// Grid: (rows) or (rows, columns / 256), 256 threads. Bytes: rope 8 an element; gated_activation 12 a result; add 12;
// take_rows 8. Roof of all: memory bandwidth.
#include "common.cuh"

// Pairs (i, i + rotary / 2) of each head, in place (Su et al. 2021, eq. 34; pairing as in Hugging Face). A thread takes a
// pair. angles [num_positions, rotary]: cos, then sin. A position outside of it makes NaN: there is no such rotation.
extern "C" __global__ void __launch_bounds__(256)
rope(float *x, long long row_stride, const int *__restrict__ positions, const float *__restrict__ angles,
     int num_positions, int heads, int dim, int rotary) {
    const int half = rotary / 2, position = positions[blockIdx.x];
    const bool known = position >= 0 && position < num_positions;
    const float *turn = angles + (long long)(known ? position : 0) * rotary;
    for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
        float *pair = x + blockIdx.x * row_stride + i / half * dim + i % half;
        const float first = pair[0], second = pair[half], cosine = turn[i % half], sine = turn[half + i % half];
        pair[0] = known ? rotated(first, -second, cosine, sine) : __int_as_float(0x7fc00000);
        pair[half] = known ? rotated(second, first, cosine, sine) : __int_as_float(0x7fc00000);
    }
}

// silu: Elfwing et al. 2017; gelu: Hendrycks & Gimpel 2016, exact and in its tanh form.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#ifndef ACTIVATION
#define ACTIVATION SILU
#endif
__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == SILU
    return x / (1.f + expf(-x)); // expf(-x) of a very negative x is infinite, and x / inf the right 0
#elif ACTIVATION == GELU
    return 0.5f * x * erfcf(-0.70710678118654752f * x); // 1 + erf(z) = erfc(-z), without the cancellation
#elif ACTIVATION == GELU_TANH
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * fmaf(0.044715f * x * x, x, x)));
#else
    return x < 0.f ? 0.f : x; // a NaN passes
#endif
}

// out[t, i] = act(gate_up[t, i]) * gate_up[t, cols + i]; grid (rows, cols / 256).
extern "C" __global__ void __launch_bounds__(256)
gated_activation(const float *__restrict__ gate_up, float *__restrict__ out, int cols) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    const float *row = gate_up + 2ll * blockIdx.x * cols;
    out[(long long)blockIdx.x * cols + i] = activated(row[i]) * row[cols + i];
}

// x += y, both of `count` elements.
extern "C" __global__ void __launch_bounds__(256) add(float *x, const float *y, long long count) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x)
        x[i] += y[i];
}

// out[r] = x[rows[r]].
extern "C" __global__ void __launch_bounds__(256)
take_rows(const float *__restrict__ x, const int *__restrict__ rows, float *__restrict__ out, int cols) {
    const float *source = x + (long long)rows[blockIdx.x] * cols;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[(long long)blockIdx.x * cols + i] = source[i];
}

// out[t, i] = x[t, i] / factors[t] in the storage type (-DSTORAGE), zeros from column `cols` to `padded`: rows of a matrix
// product on tensor cores. A float16 row whose largest value would not fit, or not well, is divided by a power of two,
// which finish_rows multiplies by again: so the product is right whatever the row's size. Other types take any row.
//
// Grid: rows, 256 threads. Bytes: 4 (8 in float16) and itemsize an element.
extern "C" __global__ void __launch_bounds__(256)
narrow_rows(const float *__restrict__ x, stored_t *__restrict__ out, float *__restrict__ factors, int cols, int padded) {
    const float *row = x + (long long)blockIdx.x * cols;
    float down = 1.f, factor = 1.f;
#if STORAGE == 1
    __shared__ unsigned maxima[8];
    unsigned largest = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) largest = max(largest, __float_as_uint(row[i]) & 0x7fffffffu);
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, lanes));
    if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = largest;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x >> 5; i++) largest = max(largest, maxima[i]);
    const int exponent = largest >> 23; // 0 for zeros (or denormals), 255 for infinities and NaN, which stay what they are
    if (exponent > 0 && exponent < 255 && (exponent >= 127 + 15 || exponent < 127 - 4)) {
        const int power = min(exponent, 253); // a factor and its inverse are normal numbers
        down = __uint_as_float((unsigned)(254 - power) << 23);
        factor = __uint_as_float((unsigned)power << 23);
    }
#endif
    for (int i = threadIdx.x; i < padded; i += blockDim.x)
        narrow(i < cols ? row[i] * down : 0.f, out + (long long)blockIdx.x * padded + i);
    if (threadIdx.x == 0) factors[blockIdx.x] = factor;
}

// out[t, i] = out[t, i] * factors[t] + bias[i], after a matrix product; bias may be absent.
//
// Grid: rows, 256 threads. Bytes: 8 an element; nothing where there is nothing to do.
extern "C" __global__ void __launch_bounds__(256)
finish_rows(float *out, long long out_stride, const float *__restrict__ factors, const float *__restrict__ bias, int cols) {
    const float factor = factors[blockIdx.x];
    if (factor == 1.f && !bias) return;
    float *row = out + blockIdx.x * out_stride;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) row[i] = bias ? row[i] * factor + bias[i] : row[i] * factor;
}
